#include <kernels/common/lane.h>
#include <kernels/signs/signs_cpu.inl>

namespace zeroth::kernels::detail {

void sign_message_scalar(const SignMessageArgs& args) {
  sign_message_any<Lane>(args);
}
void sign_pack_scalar(const SignPackArgs& args) {
  sign_pack_any<Lane>(args);
}
void sign_sum_scalar(const SignSumArgs& args) {
  sign_sum_any<Lane>(args);
}

}  // namespace zeroth::kernels::detail
