#include <kernels/quant/quant_cpu.inl>
#include <kernels/quant/quant_wide_avx512.h>

namespace zeroth::kernels::detail {

void quantize_avx512(const QuantizeArgs& args) {
  quantize_any<Avx512>(args);
}
void dequantize_avx512(const DequantizeArgs& args) {
  dequantize_any<Avx512>(args);
}
void requantize_avx512(const RequantizeArgs& args) {
  requantize_any<Avx512>(args);
}

}  // namespace zeroth::kernels::detail
