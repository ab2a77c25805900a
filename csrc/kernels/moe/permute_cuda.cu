#include <kernels/common/launch_cuda.h>
#include <kernels/moe/moe_cuda.h>
#include <kernels/moe/permute_grid.h>

extern "C" int zeroth_cuda_moe_permute(const zeroth::kernels::PermuteArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::permute_on_grid(*args, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}

extern "C" int zeroth_cuda_moe_unpermute(const zeroth::kernels::UnpermuteArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::unpermute_on_grid(*args, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}

extern "C" int zeroth_cuda_moe_unpermute_weights(const zeroth::kernels::UnpermuteArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::unpermute_weights_on_grid(*args, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}

extern "C" int zeroth_cuda_moe_jitter(const zeroth::kernels::JitterArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::jitter_on_grid(*args, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}
