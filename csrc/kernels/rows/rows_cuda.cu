#include <kernels/common/launch_cuda.h>
#include <kernels/rows/rows_cuda.h>
#include <kernels/rows/rows_grid.h>

extern "C" int zeroth_cuda_gather_rows(const zeroth::kernels::GatherRowsArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::gather_rows_on_grid(*args, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}
