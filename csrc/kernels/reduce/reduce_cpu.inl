// Memory access of sum_sources; included once per instruction set.
#include <kernels/common/loops.h>
#include <kernels/reduce/reduce_math.h>
#include <kernels/reduce/reduce_variants.h>

namespace zeroth::kernels {
namespace {

/// Sources read side by side: more streams than that and the hardware prefetchers lose track.
constexpr int kGroup = 4;
/// Elements of the running sum that stay in the L1 cache between two groups of sources (8 or 16 KiB).
constexpr std::int64_t kBlock = 2048;

/// What one pass over a block reads: the running sum of the groups before, if any, and the next sources, all
/// at element 0 of the block.
template <class Sum, class In>
struct SumInput {
  const Sum* running;
  const In* source[kGroup];
};

/// ((running + s0) + s1) ..., or (s0 + s1) ... in the first group.
template <int kCount, bool kRunning, class W, class Sum, class In>
ZR_INLINE W sum_group(const SumInput<Sum, In>& in, std::int64_t i) {
  const auto source = [&](int k) { return W::load(in.source[k] + i); };
  if constexpr (kRunning) {
    return add_in_order<0, kCount>(W::load(in.running + i), source);
  } else {
    return add_in_order<1, kCount>(source(0), source);
  }
}

/// Where the sum of a pass goes.
enum class Target { kRunning, kStore, kStream, kAccumulate };

template <template <class> class V, int kCount, bool kRunning, Target kTarget, class Out, class Sum, class In>
void sum_pass(Out* out, const SumInput<Sum, In>& input, std::int64_t n) {
  const SumInput<Sum, In> in = input;
  for_each_vector<V, Sum>(0, n, [&](auto width, std::int64_t i) {
    using W = typename decltype(width)::Vector;
    W sum = sum_group<kCount, kRunning, W>(in, i);
    if constexpr (kTarget == Target::kAccumulate) {
      sum = accumulated(W::load(out + i), sum);
    }
    if constexpr (kTarget != Target::kRunning) {
      sum = canonical(sum);
    }
    write<kTarget == Target::kStream>(sum, out + i);
  });
}

/// The first group has 1 to kGroup sources, every later one exactly kGroup.
template <template <class> class V, Target kTarget, class Out, class Sum, class In>
void sum_pass(Out* out, const SumInput<Sum, In>& in, int count, std::int64_t n) {
  if (in.running != nullptr) {
    return sum_pass<V, kGroup, true, kTarget>(out, in, n);
  }
  switch (count) {
    case 1:
      return sum_pass<V, 1, false, kTarget>(out, in, n);
    case 2:
      return sum_pass<V, 2, false, kTarget>(out, in, n);
    case 3:
      return sum_pass<V, 3, false, kTarget>(out, in, n);
    default:
      return sum_pass<V, kGroup, false, kTarget>(out, in, n);
  }
}

/// One block of at most kBlock elements that starts at element `at` of every array.
template <template <class> class V, class Sum, class Out, class In>
void sum_block(const SumSourcesArgs& args, Sum* running, std::int64_t at, std::int64_t n, bool stream) {
  Out* const dst = static_cast<Out*>(args.dst) + at;
  int first = 0;
  for (int count = (args.num_sources - 1) % kGroup + 1; first < args.num_sources; count = kGroup) {
    SumInput<Sum, In> in{first == 0 ? nullptr : running, {}};
    for (int k = 0; k < count; ++k) {
      in.source[k] = static_cast<const In*>(args.sources[first + k]) + at;
    }
    if (first + count < args.num_sources) {
      sum_pass<V, Target::kRunning>(running, in, count, n);
    } else if (args.accumulate) {
      sum_pass<V, Target::kAccumulate>(dst, in, count, n);
    } else if (stream) {
      sum_pass<V, Target::kStream>(dst, in, count, n);
    } else {
      sum_pass<V, Target::kStore>(dst, in, count, n);
    }
    first += count;
  }
}

template <template <class> class V, class Sum, class Out, class In>
void sum_range(const SumSourcesArgs& args) {
  alignas(64) Sum running[kBlock];
  const Out* const dst = static_cast<const Out*>(args.dst);
  const bool stream = !args.accumulate && !args.read_soon && wants_streaming(dst, args.n);
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
  with_sum_types(args.src_dtype, args.dst_dtype, [&](auto types) {
    using Types = decltype(types);
    sum_range<V, typename Types::Sum, typename Types::Out, typename Types::In>(args);
  });
}

}  // namespace
}  // namespace zeroth::kernels
