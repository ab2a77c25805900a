#include <kernels/common/fp_environment.h>
#include <kernels/reduce/reduce.h>
#include <kernels/reduce/reduce_math.h>
#include <kernels/reduce/reduce_variants.h>
#include <zeroth/base/error.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

namespace zeroth::kernels {
namespace {

/// Block by block, so that the widened values stay in the cache.
void sum_mixed(const SumSourcesArgs& args, Isa isa) {
  constexpr std::int64_t kBlock = 4096;
  const auto sources = static_cast<std::size_t>(args.num_sources);
  for (std::size_t source = 0; source < sources; ++source) {
    const DType dtype = args.src_dtypes[source];
    ZR_CHECK(
        dtype == DType::kFloat32 || dtype == DType::kBFloat16, ErrorCode::kUsage, "no sum of mixed element types",
        ErrorContext{.where = "kernels.sum_sources", .expected = "fp32 and bf16", .got = std::string(name_of(dtype))});
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

DType type_of_sum(DType dtype) {
  return size_of(dtype) == 2 ? DType::kFloat32 : dtype;
}

/// Block by block, so that the sums of the groups stay in the cache.
void sum_groups(const SumSourcesArgs& args, Isa isa) {
  constexpr std::int64_t kBlock = 4096;
  const DType partial = type_of_sum(args.src_dtypes != nullptr ? args.src_dtypes[0] : args.src_dtype);
  const auto dtype_of = [&](int source) {
    return args.src_dtypes != nullptr ? args.src_dtypes[source] : args.src_dtype;
  };
  const std::int64_t stride = std::min(args.n, kBlock);
  const auto partial_bytes = static_cast<std::int64_t>(size_of(partial));
  std::vector<std::byte> sums(static_cast<std::size_t>(args.num_groups * stride * partial_bytes));
  std::vector<const void*> of_groups(static_cast<std::size_t>(args.num_groups));
  std::vector<const void*> sources(static_cast<std::size_t>(args.num_sources));
  for (std::int64_t at = 0; at < args.n; at += kBlock) {
    const std::int64_t n = std::min(kBlock, args.n - at);
    for (int source = 0; source < args.num_sources; ++source) {
      sources[static_cast<std::size_t>(source)] = static_cast<const std::byte*>(args.sources[source]) +
                                                  at * static_cast<std::int64_t>(size_of(dtype_of(source)));
    }
    int first = 0;
    for (int group = 0; group < args.num_groups; ++group) {
      std::byte* const sum = sums.data() + group * stride * partial_bytes;
      sum_sources({.dst = sum,
                   .dst_dtype = partial,
                   .sources = sources.data() + first,
                   .num_sources = args.groups[group],
                   .src_dtype = args.src_dtype,
                   .src_dtypes = args.src_dtypes != nullptr ? args.src_dtypes + first : nullptr,
                   .n = n},
                  isa);
      of_groups[static_cast<std::size_t>(group)] = sum;
      first += args.groups[group];
    }
    sum_sources({.dst = static_cast<std::byte*>(args.dst) + at * static_cast<std::int64_t>(size_of(args.dst_dtype)),
                 .dst_dtype = args.dst_dtype,
                 .accumulate = args.accumulate,
                 .sources = of_groups.data(),
                 .num_sources = args.num_groups,
                 .src_dtype = partial,
                 .n = n},
                isa);
  }
}

/// Whether sums of groups are other sums than one after the other.
bool has_groups(const SumSourcesArgs& args) {
  if (args.groups == nullptr) return false;
  const std::span<const int> groups(args.groups, static_cast<std::size_t>(args.num_groups));
  std::int64_t sources = 0;
  for (const int size : groups) sources += size > 0 ? size : args.num_sources + 1;
  ZR_CHECK(sources == args.num_sources, ErrorCode::kUsage, "the groups of a sum are not its sources",
           ErrorContext{.where = "kernels.sum_sources",
                        .expected = std::to_string(args.num_sources) + " sources, none of the groups empty"});
  return groups.size() > 1 && std::ranges::any_of(groups, [](int size) { return size > 1; });
}

}  // namespace

void sum_sources(const SumSourcesArgs& args, Isa isa) {
  const ErrorContext where{.where = "kernels.sum_sources"};
  ZR_CHECK(args.n >= 0, ErrorCode::kUsage, "negative element count", where);
  ZR_CHECK(args.num_sources >= 1, ErrorCode::kUsage, "a sum needs at least one source", where);
  if (has_groups(args)) return sum_groups(args, isa);
  if (args.src_dtypes != nullptr) {
    const DType first = args.src_dtypes[0];
    const auto is_first = [first](DType dtype) { return dtype == first; };
    if (!std::all_of(args.src_dtypes, args.src_dtypes + args.num_sources, is_first)) return sum_mixed(args, isa);
    SumSourcesArgs uniform = args;
    uniform.src_dtype = first;
    uniform.src_dtypes = nullptr;
    return sum_sources(uniform, isa);
  }
  ZR_CHECK(is_summable(args.src_dtype, args.dst_dtype), ErrorCode::kUsage, "no sum of these element types",
           ErrorContext{.where = "kernels.sum_sources",
                        .expected = "fp32 to or from bf16 or fp16, or equal ones but uint8",
                        .got = std::string(name_of(args.src_dtype)) + " -> " + std::string(name_of(args.dst_dtype))});
  detail::require_supported(isa, "sum_sources");
  const detail::FpEnvironment environment;
  detail::select(isa, detail::sum_sources_scalar, detail::sum_sources_avx2, detail::sum_sources_avx512)(args);
}

}  // namespace zeroth::kernels
