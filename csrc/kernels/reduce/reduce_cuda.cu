#include <kernels/common/launch_cuda.h>
#include <kernels/reduce/extreme_grid.h>
#include <kernels/reduce/reduce_cuda.h>
#include <kernels/reduce/reduce_grid.h>

extern "C" int zeroth_cuda_sum_sources(const zeroth::kernels::SumSourcesArgs* args, void* workspace, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::sum_on_grid(*args, workspace, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}

extern "C" std::int64_t zeroth_cuda_sum_sources_workspace(const zeroth::kernels::SumSourcesArgs* args) {
  using namespace zeroth::kernels;
  return args != nullptr ? sum_workspace_bytes<kMostSources>(*args) : 0;
}

extern "C" int zeroth_cuda_extreme_sources(const zeroth::kernels::ExtremeSourcesArgs* args, void* workspace,
                                           void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::extreme_on_grid(*args, workspace, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}

extern "C" std::int64_t zeroth_cuda_extreme_sources_workspace(const zeroth::kernels::ExtremeSourcesArgs* args) {
  using namespace zeroth::kernels;
  return args != nullptr ? extreme_workspace_bytes<kMostSources>(*args) : 0;
}
