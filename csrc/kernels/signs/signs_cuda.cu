#include <kernels/common/launch_cuda.h>
#include <kernels/signs/signs_cuda.h>
#include <kernels/signs/signs_grid.h>

extern "C" int zeroth_cuda_sign_message(const zeroth::kernels::SignMessageArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::sign_message_on_grid(*args, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}

extern "C" int zeroth_cuda_sign_pack(const zeroth::kernels::SignPackArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::sign_pack_on_grid(*args, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}

extern "C" int zeroth_cuda_sign_sum(const zeroth::kernels::SignSumArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::sign_sum_on_grid(*args, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}
