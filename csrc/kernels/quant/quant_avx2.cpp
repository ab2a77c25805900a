#include <kernels/quant/quant_cpu.inl>
#include <kernels/quant/quant_wide_avx2.h>

namespace zeroth::kernels::detail {

void quantize_avx2(const QuantizeArgs& args) {
  quantize_any<Avx2>(args);
}
void dequantize_avx2(const DequantizeArgs& args) {
  dequantize_any<Avx2>(args);
}
void requantize_avx2(const RequantizeArgs& args) {
  requantize_any<Avx2>(args);
}

}  // namespace zeroth::kernels::detail
