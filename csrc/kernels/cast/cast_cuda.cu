#include <kernels/cast/cast_cuda.h>
#include <kernels/cast/cast_grid.h>
#include <kernels/common/launch_cuda.h>

extern "C" int zeroth_cuda_cast(const zeroth::kernels::detail::CastArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::cast_on_grid(*args, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}
