// The compiled variants behind quant.h: contracts as there, without its checks and its floating-point environment.
#pragma once

#include <kernels/quant/quant.h>

namespace zeroth::kernels::detail {

void quantize_scalar(const QuantizeArgs& args);
void quantize_avx2(const QuantizeArgs& args);
void quantize_avx512(const QuantizeArgs& args);
void dequantize_scalar(const DequantizeArgs& args);
void dequantize_avx2(const DequantizeArgs& args);
void dequantize_avx512(const DequantizeArgs& args);
void requantize_scalar(const RequantizeArgs& args);
void requantize_avx2(const RequantizeArgs& args);
void requantize_avx512(const RequantizeArgs& args);

}  // namespace zeroth::kernels::detail
