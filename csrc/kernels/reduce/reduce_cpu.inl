// Memory access of sum_sources; included once per instruction set.
#include <kernels/common/loops.h>
#include <kernels/reduce/reduce_variants.h>

namespace zeroth::kernels {
namespace {

/// Sources read side by side: more streams than that and the hardware prefetchers lose track.
constexpr int kGroup = 4;
/// Elements of the running sum that stay in the L1 cache between two groups of sources (8 or 16 KiB).
constexpr std::int64_t kBlock = 2048;

template <class In>
struct Group {
  const In* source[kGroup];  ///< the first kCount are used
};

/// ((running + s0) + s1) ..., or (s0 + s1) ... where there is no running sum yet.
template <int kCount, class W, class In, class Sum>
ZR_INLINE W sum_group(const Sum* running, const Group<In>& group, std::int64_t i) {
  W sum = W::load(group.source[0] + i);
  if (running != nullptr) {
    sum = W::load(running + i) + sum;
  }
  if constexpr (kCount > 1) sum = sum + W::load(group.source[1] + i);
  if constexpr (kCount > 2) sum = sum + W::load(group.source[2] + i);
  if constexpr (kCount > 3) sum = sum + W::load(group.source[3] + i);
  return sum;
}

/// A group that is not the last one: its sum goes on in `running`.
template <template <class> class V, class Sum, class In>
void sum_middle(Sum* running, bool first, const Group<In>& group, std::int64_t n) {
  const Sum* const before = first ? nullptr : running;
  for_each_vector<V, Sum>(0, n, [&](auto width, std::int64_t i) {
    using W = typename decltype(width)::Vector;
    sum_group<kGroup, W>(before, group, i).store(running + i);
  });
}

/// The last group: the sum is complete and goes to dst.
template <template <class> class V, int kCount, class Sum, class Out, class In>
void sum_last(
    Out* dst, bool accumulate, bool stream, const Sum* running, const Group<In>& group, std::int64_t n) {
  const auto finish = [&](auto width, std::int64_t i, auto stores) {
    using W = typename decltype(width)::Vector;
    W sum = sum_group<kCount, W>(running, group, i);
    if (accumulate) {
      sum = W::load(dst + i) + sum;
    }
    write<stores.kStream>(canonical(sum), dst + i);
  };
  if (stream) {
    for_each_vector<V, Sum>(0, n, [&](auto width, std::int64_t i) { finish(width, i, StreamingStores{}); });
  } else {
    for_each_vector<V, Sum>(0, n, [&](auto width, std::int64_t i) { finish(width, i, CachedStores{}); });
  }
}

template <template <class> class V, class Sum, class Out, class In>
void sum_last(int count,
              Out* dst,
              bool accumulate,
              bool stream,
              const Sum* running,
              const Group<In>& g,
              std::int64_t n) {
  switch (count) {
    case 1:
      return sum_last<V, 1>(dst, accumulate, stream, running, g, n);
    case 2:
      return sum_last<V, 2>(dst, accumulate, stream, running, g, n);
    case 3:
      return sum_last<V, 3>(dst, accumulate, stream, running, g, n);
    default:
      return sum_last<V, 4>(dst, accumulate, stream, running, g, n);
  }
}

/// One block of at most kBlock elements that starts at element `at` of every array.
template <template <class> class V, class Sum, class Out, class In>
void sum_block(const SumSourcesArgs& args, Sum* running, std::int64_t at, std::int64_t n, bool stream) {
  Out* const dst = static_cast<Out*>(args.dst) + at;
  for (int first = 0;; first += kGroup) {
    const int left = args.num_sources - first;
    Group<In> group{};
    for (int k = 0; k < kGroup && k < left; ++k) {
      group.source[k] = static_cast<const In*>(args.sources[first + k]) + at;
    }
    if (left <= kGroup) {
      sum_last<V, Sum>(left, dst, args.accumulate, stream, first == 0 ? nullptr : running, group, n);
      return;
    }
    sum_middle<V, Sum>(running, first == 0, group, n);
  }
}

template <template <class> class V, class Sum, class Out, class In>
void sum_range(const SumSourcesArgs& args) {
  alignas(64) Sum running[kBlock];
  const Out* const dst = static_cast<const Out*>(args.dst);
  const bool stream = !args.accumulate && wants_streaming(dst, args.n);
  // Streaming stores need whole lines: a first short block reaches the next boundary, the other blocks are
  // multiples of a line.
  std::int64_t i = stream ? elements_until_aligned(dst, args.n) : 0;
  if (i > 0) {
    sum_block<V, Sum, Out, In>(args, running, 0, i, false);
  }
  while (i < args.n) {
    const std::int64_t n = args.n - i < kBlock ? args.n - i : kBlock;
    sum_block<V, Sum, Out, In>(args, running, i, n, stream);
    i += n;
  }
  if (stream) {
    stream_fence();
  }
}

template <template <class> class V>
void sum_sources_any(const SumSourcesArgs& args) {
  const bool narrow = args.dst_dtype == DType::kBFloat16;
  switch (args.src_dtype) {
    case DType::kFloat64:
      return sum_range<V, double, double, double>(args);
    case DType::kInt64:
      return sum_range<V, std::uint64_t, std::uint64_t, std::uint64_t>(args);
    case DType::kInt32:
      return sum_range<V, std::uint32_t, std::uint32_t, std::uint32_t>(args);
    case DType::kBFloat16:
      return narrow ? sum_range<V, float, BFloat16, BFloat16>(args)
                    : sum_range<V, float, float, BFloat16>(args);
    default:
      return narrow ? sum_range<V, float, BFloat16, float>(args) : sum_range<V, float, float, float>(args);
  }
}

}  // namespace
}  // namespace zeroth::kernels
