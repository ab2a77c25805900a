#include <kernels/common/fp_environment.h>
#include <kernels/quant/quant.h>
#include <kernels/quant/quant_math.h>
#include <kernels/quant/quant_variants.h>
#include <zeroth/base/error.h>

#include <string>

namespace zeroth::kernels {
namespace {

void check(std::int64_t n, std::int64_t block, DType dtype, const char* op, const char* where, Isa isa) {
  ZR_CHECK(n >= 0, ErrorCode::kUsage, "negative element count", ErrorContext{.where = where});
  ZR_CHECK(block > 0 && block % kCodeGroup == 0, ErrorCode::kUsage, "a block of codes has another size",
           ErrorContext{.where = where,
                        .expected = "a positive multiple of " + std::to_string(kCodeGroup),
                        .got = std::to_string(block)});
  ZR_CHECK(has_codes(dtype), ErrorCode::kUsage, "codes are of float32, bfloat16 or float16",
           ErrorContext{.where = where, .got = std::string(name_of(dtype))});
  detail::require_supported(isa, op);
}

void require_sources(int num_sources, const char* where) {
  ZR_CHECK(num_sources > 0, ErrorCode::kUsage, "a sum of no sources", ErrorContext{.where = where});
}

}  // namespace

void quantize(const QuantizeArgs& args, Isa isa) {
  check(args.n, args.block, args.src_dtype, "quantize", "kernels.quantize", isa);
  const detail::FpEnvironment environment;
  detail::select(isa, detail::quantize_scalar, detail::quantize_avx2, detail::quantize_avx512)(args);
}

void dequantize(const DequantizeArgs& args, Isa isa) {
  check(args.n, args.block, args.dst_dtype, "dequantize", "kernels.dequantize", isa);
  require_sources(args.num_sources, "kernels.dequantize");
  const detail::FpEnvironment environment;
  detail::select(isa, detail::dequantize_scalar, detail::dequantize_avx2, detail::dequantize_avx512)(args);
}

void requantize(const RequantizeArgs& args, Isa isa) {
  check(args.sum.n, args.sum.block, args.sum.dst_dtype, "requantize", "kernels.requantize", isa);
  require_sources(args.sum.num_sources, "kernels.requantize");
  ZR_CHECK(args.quantize.n == args.sum.n && args.quantize.block == args.sum.block &&
               args.sum.block <= kMostRequantized && args.sum.dst_dtype == DType::kFloat32,
           ErrorCode::kUsage, "a sum is quantized in blocks of another form",
           ErrorContext{.where = "kernels.requantize",
                        .expected = "the same n and block on both sides, at most 4096, and float32"});
  const detail::FpEnvironment environment;
  detail::select(isa, detail::requantize_scalar, detail::requantize_avx2, detail::requantize_avx512)(args);
}

}  // namespace zeroth::kernels
