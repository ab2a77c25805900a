// Memory access of topk.h; included once per instruction set.
#include <kernels/common/loops.h>
#include <kernels/topk/topk_math.h>
#include <kernels/topk/topk_variants.h>

namespace zeroth::kernels {
namespace {

template <class Body>
ZR_INLINE void with_topk_type(DType dtype, const void* src, const Body& body) {
  if (dtype == DType::kBFloat16) return body(static_cast<const BFloat16*>(src));
  if (dtype == DType::kFloat16) return body(static_cast<const Float16*>(src));
  body(static_cast<const float*>(src));
}

/// Counts every element's highest digit. Equal digits follow each other often, so neighbours go into tables of their
/// own: a counter is not read before it was written.
template <template <class> class V, bool kError, class In>
void count_all(const In* src, float* error, std::int64_t n, std::int64_t* counts) {
  constexpr std::int64_t kTile = 256;
  constexpr std::int64_t kTables = 4;
  std::uint32_t tables[kTables][kTopkBins] = {};
  alignas(64) float messages[kTile];
  for (std::int64_t begin = 0; begin < n; begin += kTile) {
    const std::int64_t count = n - begin < kTile ? n - begin : kTile;
    for_each_vector<V, float>(0, count, [&](auto width, std::int64_t i) {
      using W = typename decltype(width)::Vector;
      W message = W::load(src + begin + i);
      if constexpr (kError) message = message + W::load(error + begin + i);
      message = topk_message(message);
      message.store(messages + i);
      if constexpr (kError) message.store(error + begin + i);
    });
    std::int64_t i = 0;
    for (; i + kTables <= count; i += kTables) {
      for (std::int64_t t = 0; t < kTables; ++t) ++tables[t][digit_of(key_of(Lane<float>{messages[i + t]}), 0)];
    }
    for (; i < count; ++i) ++tables[0][digit_of(key_of(Lane<float>{messages[i]}), 0)];
  }
  for (std::int64_t bin = 0; bin < kTopkBins; ++bin) {
    for (const auto& table : tables) counts[bin] += table[bin];
  }
}

/// Calls body(i, message) for the elements whose magnitude has at least the bits of `least`, and less than those of
/// `above`, in their order.
template <template <class> class V, class In, class Body>
ZR_INLINE void for_each_between(const In* src, std::int64_t n, std::uint32_t least, std::uint32_t above,
                                const Body& body) {
  const float first = __builtin_bit_cast(float, least);
  const float limit = __builtin_bit_cast(float, above);
  for_each_vector<V, float>(0, n, [&](auto width, std::int64_t i) {
    using W = typename decltype(width)::Vector;
    const W message = topk_message(W::load(src + i));
    unsigned found = message.at_least(first) & ~message.at_least(limit);
    if (found == 0) return;
    alignas(64) float lanes[W::kLanes];
    message.store(lanes);
    for (; found != 0; found &= found - 1U) {
      const int lane = __builtin_ctz(found);
      body(i + lane, Lane<float>{lanes[lane]});
    }
  });
}

/// Counts a further digit of the elements with the prefix. Neighbours go into tables of their own, as in count_all().
template <template <class> class V, class In>
void count_prefixed(const In* src, std::int64_t n, const TopkCut& cut, std::int64_t* counts) {
  constexpr std::int64_t kTables = 4;
  std::uint32_t tables[kTables][kTopkBins / 2] = {};
  const std::uint32_t above = cut.prefix + (1U << topk_shift(cut.level - 1));
  const unsigned shift = topk_shift(cut.level);
  for_each_between<V>(src, n, cut.prefix, above, [&](std::int64_t i, Lane<float> message) {
    ++tables[i % kTables][key_of(message) >> shift & (kTopkBins / 2 - 1)];
  });
  for (std::int64_t bin = 0; bin < kTopkBins / 2; ++bin) {
    for (const auto& table : tables) counts[bin] += table[bin];
  }
}

template <template <class> class V>
void topk_count_any(const TopkCountArgs& args) {
  with_topk_type(args.src_dtype, args.src, [&](const auto* src) {
    if (args.cut.level == 0) {
      with_flag(args.error != nullptr, [&](auto has_error) {
        count_all<V, decltype(has_error)::kValue>(src, args.error, args.n, args.counts);
      });
      return;
    }
    count_prefixed<V>(src, args.n, args.cut, args.counts);
  });
}

template <template <class> class V>
std::int64_t topk_take_any(const TopkTakeArgs& args) {
  std::int64_t taken = 0;
  std::int64_t ties = args.cut.left;
  with_topk_type(args.dtype, args.message, [&](const auto* src) {
    for_each_between<V>(src, args.n, args.cut.prefix, ~0U, [&](std::int64_t i, Lane<float> message) {
      if (key_of(message) == args.cut.prefix && ties-- <= 0) return;
      if (taken >= args.capacity) return;
      args.places[taken] = args.first + static_cast<std::int32_t>(i);
      args.values[taken] = message.v;
      ++taken;
      if (args.error != nullptr) args.error[i] = 0.0F;
    });
  });
  return taken;
}

template <template <class> class V, bool kError, class In>
std::int64_t collect(const In* src, const detail::TopkCollectArgs& args) {
  const float least = __builtin_bit_cast(float, args.least);
  std::int64_t found = 0;
  for_each_vector<V, float>(0, args.n, [&](auto width, std::int64_t i) {
    using W = typename decltype(width)::Vector;
    W message = W::load(src + i);
    if constexpr (kError) message = message + W::load(args.error + i);
    message = topk_message(message);
    if constexpr (kError) message.store(args.error + i);
    unsigned here = message.at_least(least);
    if constexpr (W::kChooses) {
      // No branch: whether a vector has one cannot be foreseen.
      if (found + W::kLanes <= args.capacity) {
        message.store_chosen(here, static_cast<std::int32_t>(i), args.values + found, args.places + found);
        found += __builtin_popcount(here);
        return;
      }
    }
    if (here == 0) return;
    alignas(64) float lanes[W::kLanes];
    message.store(lanes);
    for (; here != 0; here &= here - 1U) {
      const int lane = __builtin_ctz(here);
      if (found < args.capacity) {
        args.places[found] = static_cast<std::int32_t>(i + lane);
        args.values[found] = lanes[lane];
      }
      ++found;
    }
  });
  return found;
}

template <template <class> class V>
std::int64_t topk_collect_any(const detail::TopkCollectArgs& args) {
  std::int64_t found = 0;
  with_topk_type(args.src_dtype, args.src, [&](const auto* src) {
    with_flag(args.error != nullptr,
              [&](auto has_error) { found = collect<V, decltype(has_error)::kValue>(src, args); });
  });
  return found;
}

}  // namespace
}  // namespace zeroth::kernels
