// sum_sources on a grid, see common/grid.h.
#pragma once

#include <kernels/common/grid.h>
#include <kernels/reduce/reduce.h>
#include <kernels/reduce/reduce_math.h>

#include <cstdint>
#include <type_traits>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

// [Note: Sums in several launches]
// More than kMostSources sources are summed in several launches, which must round as one launch would. So every launch
// but the last stores two values in a workspace, in the type of the sum: the partial sum of its last group, and the sum
// of the groups before it. The next launch continues from there. They are not stored in dst, which may be narrower, or
// one of the later sources.

/// The part of the sources that one launch sums. Ends of groups count from its first source.
template <int kMost>
struct SumPart {
  static_assert(kMost <= 255);
  const void* source[kMost];
  std::uint8_t narrow[kMost];         ///< of mixed sources: 1 for bf16
  std::uint8_t group_end[kMost + 1];  ///< the first group, if resumed, may have no source here
  int num_groups;
  bool resumes;    ///< the first group began in the previous launch
  bool has_total;  ///< earlier launches have summed whole groups
  bool suspends;   ///< the next launch continues the last group
};

/// Calls each(part) for the launches, in order.
template <int kMost, class Each>
void for_each_sum_part(const SumSourcesArgs& args, const Each& each) {
  const auto size_of_group = [&](int group) { return args.groups != nullptr ? args.groups[group] : args.num_sources; };
  bool resumes = false;
  bool has_total = false;
  int group = 0;
  int left = size_of_group(0);
  for (int first = 0; first < args.num_sources;) {
    SumPart<kMost> part{};
    part.resumes = resumes;
    part.has_total = has_total;
    int used = 0;
    while (true) {
      for (; left > 0 && used < kMost; --left, ++used) {
        part.source[used] = args.sources[first + used];
        part.narrow[used] = args.src_dtypes != nullptr && args.src_dtypes[first + used] == DType::kBFloat16;
      }
      part.group_end[part.num_groups++] = static_cast<std::uint8_t>(used);
      if (used == kMost || first + used == args.num_sources) {
        break;
      }
      left = size_of_group(++group);
    }
    first += used;
    part.suspends = first < args.num_sources;
    resumes = part.suspends;
    has_total = has_total || part.num_groups > 1;
    each(part);
  }
}

/// kMixed: In is float, and the narrow sources are bf16.
template <class Types, bool kMixed, int kLanes, int kMost>
struct SumGrid {
  using Sum = typename Types::Sum;
  typename Types::Out* dst;
  Sum* total;    ///< see [Note: Sums in several launches]
  Sum* partial;  ///< likewise
  std::int64_t n;
  bool accumulate;
  SumPart<kMost> part;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for_each_pack<kLanes>(thread, n, [&](auto lanes, std::int64_t i) { sum<PackOf<Sum, decltype(lanes)::kValue>>(i); });
  }

 private:
  template <class W>
  ZR_HOST_DEVICE ZR_INLINE W source(int k, std::int64_t i) const {
    if constexpr (kMixed) {
      if (part.narrow[k] != 0) {
        return W::load(static_cast<const BFloat16*>(part.source[k]) + i);
      }
    }
    return W::load(static_cast<const typename Types::In*>(part.source[k]) + i);
  }

  /// The lanes of one vector at element i. All conditions depend on the launch only, so a warp never diverges.
  template <class W>
  ZR_HOST_DEVICE ZR_INLINE void sum(std::int64_t i) const {
    constexpr int kAtOnce = 4;  // loads that do not wait for each other
    bool has_sum = part.has_total;
    W all = has_sum ? W::load(total + i) : W{};
    int k = 0;
    for (int group = 0; group < part.num_groups; ++group) {
      const int end = part.group_end[group];
      const bool resumed = group == 0 && part.resumes;
      W of_group = resumed ? W::load(partial + i) : source<W>(k, i);
      k += resumed ? 0 : 1;
      for (; k + kAtOnce <= end; k += kAtOnce) {
        of_group = add_in_order<0, kAtOnce>(of_group, [&](int next) { return source<W>(k + next, i); });
      }
      for (; k < end; ++k) {
        of_group = of_group + source<W>(k, i);
      }
      if (part.suspends && group + 1 == part.num_groups) {
        of_group.store(partial + i);
        if (has_sum) {
          all.store(total + i);
        }
        return;
      }
      all = has_sum ? all + of_group : of_group;
      has_sum = true;
    }
    if (accumulate) {
      all = accumulated(W::load(dst + i), all);
    }
    canonical(all).store(dst + i);
  }
};

/// Elements of each of the two arrays in the workspace.
inline std::int64_t sum_workspace_stride(std::int64_t n) {
  return (n + kPack - 1) / kPack * kPack;
}

template <int kMost>
std::int64_t sum_workspace_bytes(const SumSourcesArgs& args) {
  if (args.num_sources <= kMost || args.n <= 0) {
    return 0;
  }
  const DType src = args.src_dtypes != nullptr ? args.src_dtypes[0] : args.src_dtype;
  return 2 * sum_workspace_stride(args.n) * static_cast<std::int64_t>(size_of(accumulation_dtype(src)));
}

struct SumSource {
  DType dtype;  ///< of all sources; kFloat32 for fp32 and bf16 mixed
  bool mixed;
  bool good;  ///< false for other mixtures
};

inline SumSource sum_source_of(const SumSourcesArgs& args) {
  if (args.src_dtypes == nullptr) {
    return {args.src_dtype, false, true};
  }
  bool mixed = false;
  bool mixable = true;
  for (int k = 0; k < args.num_sources; ++k) {
    const DType dtype = args.src_dtypes[k];
    mixed = mixed || dtype != args.src_dtypes[0];
    mixable = mixable && (dtype == DType::kFloat32 || dtype == DType::kBFloat16);
  }
  return {mixed ? DType::kFloat32 : args.src_dtypes[0], mixed, mixable || !mixed};
}

inline bool are_groups_of_sources(const SumSourcesArgs& args) {
  std::int64_t sources = 0;
  for (int group = 0; group < args.num_groups; ++group) {
    if (args.groups[group] <= 0) {
      return false;
    }
    sources += args.groups[group];
  }
  return sources == args.num_sources;
}

template <class Types, bool kMixed, int kLanes, int kMost, class Launch>
void launch_sum(const SumSourcesArgs& args, void* workspace, Launch& launch) {
  auto* const total = static_cast<typename Types::Sum*>(workspace);
  auto* const partial = total != nullptr ? total + sum_workspace_stride(args.n) : nullptr;
  auto* const dst = static_cast<typename Types::Out*>(args.dst);
  for_each_sum_part<kMost>(args, [&](const SumPart<kMost>& part) {
    launch(SumGrid<Types, kMixed, kLanes, kMost>{dst, total, partial, args.n, args.accumulate, part},
           threads_for<kLanes>(args.n));
  });
}

template <int kMost = kMostSources, class Launch>
bool sum_on_grid(const SumSourcesArgs& args, void* workspace, Launch& launch) {
  if (args.n < 0 || args.num_sources < 1 || (args.groups != nullptr && !are_groups_of_sources(args)) ||
      (workspace == nullptr && sum_workspace_bytes<kMost>(args) != 0)) {
    return false;
  }
  const SumSource source = sum_source_of(args);
  if (!source.good || !is_summable(source.dtype, args.dst_dtype)) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  with_sum_types(source.dtype, args.dst_dtype, [&](auto types) {
    using Types = decltype(types);
    using In = typename Types::In;
    bool packable = is_packable(static_cast<const typename Types::Out*>(args.dst)) &&
                    is_packable(static_cast<const typename Types::Sum*>(workspace));
    for (int k = 0; k < args.num_sources; ++k) {
      const bool narrow = source.mixed && args.src_dtypes[k] == DType::kBFloat16;
      packable = packable && (narrow ? is_packable(static_cast<const BFloat16*>(args.sources[k]))
                                     : is_packable(static_cast<const In*>(args.sources[k])));
    }
    with_packs(packable, [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::kValue;
      if constexpr (std::is_same_v<In, float>) {
        if (source.mixed) {
          return launch_sum<Types, true, kLanes, kMost>(args, workspace, launch);
        }
      }
      launch_sum<Types, false, kLanes, kMost>(args, workspace, launch);
    });
  });
  return true;
}

}  // namespace
}  // namespace zeroth::kernels
