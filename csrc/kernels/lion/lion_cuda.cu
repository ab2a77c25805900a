#include <kernels/common/launch_cuda.h>
#include <kernels/lion/lion_cuda.h>
#include <kernels/lion/lion_grid.h>

extern "C" int zeroth_cuda_lion(const zeroth::kernels::LionArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::lion_on_grid(*args, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}
