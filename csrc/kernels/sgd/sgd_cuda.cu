#include <kernels/common/launch_cuda.h>
#include <kernels/sgd/sgd_cuda.h>
#include <kernels/sgd/sgd_grid.h>

extern "C" int zeroth_cuda_sgd(const zeroth::kernels::SgdArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::sgd_on_grid(*args, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}
