#include <kernels/common/fp_environment.h>
#include <kernels/reduce/reduce.h>
#include <kernels/reduce/reduce_variants.h>
#include <zeroth/base/error.h>

namespace zeroth::kernels {
namespace {

bool is_summable(DType src, DType dst) {
  switch (src) {
    case DType::kFloat32:
    case DType::kBFloat16:
      return dst == DType::kFloat32 || dst == DType::kBFloat16;
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kInt32:
      return dst == src;
    case DType::kUInt8:
      break;
  }
  return false;
}

}  // namespace

void sum_sources(const SumSourcesArgs& args, Isa isa) {
  const ErrorContext where{.where = "kernels.sum_sources"};
  ZR_CHECK(args.n >= 0, ErrorCode::kUsage, "negative element count", where);
  ZR_CHECK(args.num_sources >= 1, ErrorCode::kUsage, "a sum needs at least one source", where);
  ZR_CHECK(is_summable(args.src_dtype, args.dst_dtype),
           ErrorCode::kUsage,
           "no sum of these element types",
           ErrorContext{
               .where = "kernels.sum_sources",
               .expected = "fp32|bf16 -> fp32|bf16, or equal fp64, int64, int32",
               .got = std::string(name_of(args.src_dtype)) + " -> " + std::string(name_of(args.dst_dtype))});
  detail::require_supported(isa, "sum_sources");
  const detail::FpEnvironment environment;
  detail::select(isa, detail::sum_sources_scalar, detail::sum_sources_avx2, detail::sum_sources_avx512)(args);
}

}  // namespace zeroth::kernels
