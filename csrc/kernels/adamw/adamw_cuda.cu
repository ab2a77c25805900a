#include <kernels/adamw/adamw_cuda.h>
#include <kernels/adamw/adamw_grid.h>
#include <kernels/common/launch_cuda.h>

extern "C" int zeroth_cuda_adamw(const zeroth::kernels::AdamWArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::adamw_on_grid(*args, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}
