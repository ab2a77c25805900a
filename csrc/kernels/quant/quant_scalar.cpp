#include <kernels/common/lane.h>
#include <kernels/quant/quant_cpu.inl>

namespace zeroth::kernels::detail {

void quantize_scalar(const QuantizeArgs& args) {
  quantize_any<Lane>(args);
}
void dequantize_scalar(const DequantizeArgs& args) {
  dequantize_any<Lane>(args);
}
void requantize_scalar(const RequantizeArgs& args) {
  requantize_any<Lane>(args);
}

}  // namespace zeroth::kernels::detail
