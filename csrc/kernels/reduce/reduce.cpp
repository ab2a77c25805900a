#include <kernels/common/fp_environment.h>
#include <kernels/reduce/reduce.h>
#include <kernels/reduce/reduce_variants.h>
#include <zeroth/base/error.h>

#include <algorithm>
#include <vector>

namespace zeroth::kernels {
namespace {

bool is_summable(DType src, DType dst) {
  switch (src) {
    case DType::kFloat32:
      return dst == DType::kFloat32 || dst == DType::kBFloat16 || dst == DType::kFloat16;
    case DType::kBFloat16:
    case DType::kFloat16:
      return dst == DType::kFloat32 || dst == src;
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kInt32:
      return dst == src;
    case DType::kUInt8:
      break;
  }
  return false;
}

/// Block by block, so that the widened values stay in the cache.
void sum_mixed(const SumSourcesArgs& args, Isa isa) {
  constexpr std::int64_t kBlock = 4096;
  const auto sources = static_cast<std::size_t>(args.num_sources);
  for (std::size_t source = 0; source < sources; ++source) {
    const DType dtype = args.src_dtypes[source];
    ZR_CHECK(dtype == DType::kFloat32 || dtype == DType::kBFloat16,
             ErrorCode::kUsage,
             "no sum of mixed element types",
             ErrorContext{.where = "kernels.sum_sources",
                          .expected = "fp32 and bf16",
                          .got = std::string(name_of(dtype))});
  }
  const auto stride = static_cast<std::size_t>(std::min(args.n, kBlock));
  std::vector<float> widened(sources * stride);
  std::vector<const void*> wide(sources);
  SumSourcesArgs block = args;
  block.src_dtype = DType::kFloat32;
  block.src_dtypes = nullptr;
  block.sources = wide.data();
  for (std::int64_t at = 0; at < args.n; at += kBlock) {
    block.n = std::min(kBlock, args.n - at);
    block.dst = static_cast<std::byte*>(args.dst) + at * static_cast<std::int64_t>(size_of(args.dst_dtype));
    for (std::size_t source = 0; source < sources; ++source) {
      if (args.src_dtypes[source] == DType::kFloat32) {
        wide[source] = static_cast<const float*>(args.sources[source]) + at;
        continue;
      }
      const void* const narrow = static_cast<const BFloat16*>(args.sources[source]) + at;
      float* const place = widened.data() + source * stride;
      sum_sources({.dst = place, .sources = &narrow, .num_sources = 1, .src_dtype = DType::kBFloat16, .n = block.n},
                  isa);
      wide[source] = place;
    }
    sum_sources(block, isa);
  }
}

}  // namespace

void sum_sources(const SumSourcesArgs& args, Isa isa) {
  const ErrorContext where{.where = "kernels.sum_sources"};
  ZR_CHECK(args.n >= 0, ErrorCode::kUsage, "negative element count", where);
  ZR_CHECK(args.num_sources >= 1, ErrorCode::kUsage, "a sum needs at least one source", where);
  if (args.src_dtypes != nullptr) {
    const DType first = args.src_dtypes[0];
    const auto is_first = [first](DType dtype) { return dtype == first; };
    if (!std::all_of(args.src_dtypes, args.src_dtypes + args.num_sources, is_first)) return sum_mixed(args, isa);
    SumSourcesArgs uniform = args;
    uniform.src_dtype = first;
    uniform.src_dtypes = nullptr;
    return sum_sources(uniform, isa);
  }
  ZR_CHECK(is_summable(args.src_dtype, args.dst_dtype),
           ErrorCode::kUsage,
           "no sum of these element types",
           ErrorContext{
               .where = "kernels.sum_sources",
               .expected = "fp32 to or from bf16 or fp16, or equal ones but uint8",
               .got = std::string(name_of(args.src_dtype)) + " -> " + std::string(name_of(args.dst_dtype))});
  detail::require_supported(isa, "sum_sources");
  const detail::FpEnvironment environment;
  detail::select(isa, detail::sum_sources_scalar, detail::sum_sources_avx2, detail::sum_sources_avx512)(args);
}

}  // namespace zeroth::kernels
