// topk.h on a grid, see common/grid.h. Nothing is looked at by the host: the cut is found on the device.
//
//   start    counts and the first cut
//   count    each level: the digits of the elements that have the prefix (integer sums: exact in any order)
//   choose   the next cut, from the highest digit on: a scan
//   size     how many elements of each block are above the cut, and how many are ties
//   place    the same before each block: a scan
//   take     places and values, in the order of the elements; of the ties those of lower index
//
// Bodies have three forms besides that of grid.h. They are given what a device does with several threads at once:
//
//   launch.count(body, threads)   body(GridThread, deliver): deliver(digit) adds 1 to body.counts[digit]
//   launch.scan(body)             body.sum(lane) of kScanLanes lanes; then body.finish(lane, sum of the lanes before
//   it) launch.warps(body, warps)     body(GridThread of warps, lanes): lanes.vote(f) has bit l set where f(l) is true
//   of
//                                 lanes l = 0 .. 31, lanes.each(f) calls f(l) of each, lanes.count(mask) the bits set
#pragma once

#include <kernels/common/grid.h>
#include <kernels/topk/topk_math.h>

#include <type_traits>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

inline constexpr std::int64_t kTopkLanes = 32;
inline constexpr std::int64_t kScanLanes = 256;
/// Elements of which a warp takes those that it takes.
inline constexpr std::int64_t kTopkBlock = 2048;
/// Threads that count: more blocks would only have more tables to add.
inline constexpr std::int64_t kMostCounters = std::int64_t{1} << 18U;

/// How many elements are above the cut, and how many are at it.
struct TopkTotals {
  std::uint32_t greater;
  std::uint32_t ties;
  ZR_HOST_DEVICE friend TopkTotals operator+(TopkTotals a, TopkTotals b) {
    return {a.greater + b.greater, a.ties + b.ties};
  }
  ZR_HOST_DEVICE friend TopkTotals operator-(TopkTotals a, TopkTotals b) {
    return {a.greater - b.greater, a.ties - b.ties};
  }
};

ZR_HOST_DEVICE constexpr std::int64_t topk_blocks(std::int64_t n) {
  return (n + kTopkBlock - 1) / kTopkBlock;
}

/// The workspace of one call, aligned to 8 bytes.
struct TopkWorkspace {
  TopkCut cuts[kTopkLevels + 1];  ///< one after the other: a launch writes none that it reads
  std::uint32_t counts[kTopkLevels][kTopkBins];

  /// Behind it: [topk_blocks(n) + 1]
  [[nodiscard]] TopkTotals* totals() { return reinterpret_cast<TopkTotals*>(this + 1); }
};
constexpr std::int64_t topk_workspace_bytes(std::int64_t n) {
  return static_cast<std::int64_t>(sizeof(TopkWorkspace)) +
         (topk_blocks(n) + 1) * static_cast<std::int64_t>(sizeof(TopkTotals));
}

struct TopkStartGrid {
  TopkWorkspace* work;
  std::int64_t k;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for (std::int64_t i = thread.index; i < kTopkLevels * kTopkBins; i += thread.count)
      work->counts[i / kTopkBins][i % kTopkBins] = 0;
    if (thread.index == 0) work->cuts[0] = {.prefix = 0, .level = 0, .left = k};
  }
};

/// kError, at level 0 only: `error` becomes the message.
template <bool kError, class In>
struct TopkCountGrid {
  const In* src;
  float* error;
  std::int64_t n;
  const TopkCut* cut;
  int level;
  std::uint32_t* counts;

  template <class Deliver>
  ZR_HOST_DEVICE void operator()(GridThread thread, const Deliver& deliver) const {
    const std::uint32_t prefix = cut->prefix;
    for (std::int64_t i = thread.index; i < n; i += thread.count) {
      auto message = Lane<float>::load(src + i);
      if constexpr (kError) message = message + Lane<float>::load(error + i);
      message = topk_message(message);
      if constexpr (kError) message.store(error + i);
      const std::uint32_t key = key_of(message);
      if (level > 0 && (key ^ prefix) >> topk_shift(level - 1) != 0) continue;
      deliver(digit_of(key, level));
    }
  }
};

/// As topk_next(). A lane has some neighbouring digits, the first lane the highest. Where nothing is taken, the highest
/// digits are chosen, which no element has.
struct TopkChooseGrid {
  using Sum = std::uint32_t;
  const std::uint32_t* counts;
  const TopkCut* before;
  TopkCut* after;
  int level;

  ZR_HOST_DEVICE std::uint32_t digits_of_lane() const {
    return topk_digits(level) / static_cast<std::uint32_t>(kScanLanes);
  }
  ZR_HOST_DEVICE std::uint32_t highest_of(std::int64_t lane) const {
    return topk_digits(level) - 1U - static_cast<std::uint32_t>(lane) * digits_of_lane();
  }
  ZR_HOST_DEVICE Sum sum(std::int64_t lane) const {
    Sum all = 0;
    for (std::uint32_t i = 0; i < digits_of_lane(); ++i) all += counts[highest_of(lane) - i];
    return all;
  }
  ZR_HOST_DEVICE void finish(std::int64_t lane, Sum higher) const {
    TopkCut cut = *before;
    if (lane > 0 && higher >= cut.left) return;  // chosen by a lane of higher digits
    cut.left -= higher;
    for (std::uint32_t i = 0; i < digits_of_lane(); ++i) {
      const std::uint32_t digit = highest_of(lane) - i;
      const std::int64_t here = counts[digit];
      if (here >= cut.left) {
        cut.prefix |= digit << topk_shift(level);
        cut.level = level + 1;
        *after = cut;
        return;
      }
      cut.left -= here;
    }
  }
};

/// What a warp reads of one block of elements.
template <class In>
struct TopkBlock {
  const In* src;
  std::int64_t n;
  std::uint32_t cut;

  ZR_HOST_DEVICE bool is_greater(std::int64_t i) const { return i < n && key_at(i) > cut; }
  ZR_HOST_DEVICE bool is_tie(std::int64_t i) const { return i < n && key_at(i) == cut; }

 private:
  ZR_HOST_DEVICE std::uint32_t key_at(std::int64_t i) const { return key_of(topk_message(Lane<float>::load(src + i))); }
};

template <class In>
struct TopkSizeGrid {
  const In* src;
  std::int64_t n;
  const TopkCut* cut;
  TopkTotals* totals;

  template <class Lanes>
  ZR_HOST_DEVICE void operator()(GridThread warp, const Lanes& lanes) const {
    const TopkBlock<In> elements{src, n, cut->prefix};
    for (std::int64_t block = warp.index; block < topk_blocks(n); block += warp.count) {
      TopkTotals all{};
      for (std::int64_t first = block * kTopkBlock; first < n && first < (block + 1) * kTopkBlock;
           first += kTopkLanes) {
        all.greater += lanes.count(lanes.vote([&](std::int64_t lane) { return elements.is_greater(first + lane); }));
        all.ties += lanes.count(lanes.vote([&](std::int64_t lane) { return elements.is_tie(first + lane); }));
      }
      lanes.each([&](std::int64_t lane) {
        if (lane == 0) totals[block] = all;
      });
    }
  }
};

/// Totals of blocks become those of the blocks before each, and in the end of all.
struct TopkPlaceGrid {
  using Sum = TopkTotals;
  TopkTotals* totals;
  std::int64_t blocks;

  ZR_HOST_DEVICE std::int64_t first_of(std::int64_t lane) const { return blocks * lane / kScanLanes; }
  ZR_HOST_DEVICE Sum sum(std::int64_t lane) const {
    Sum all{};
    for (std::int64_t block = first_of(lane); block < first_of(lane + 1); ++block) all = all + totals[block];
    return all;
  }
  ZR_HOST_DEVICE void finish(std::int64_t lane, Sum before) const {
    for (std::int64_t block = first_of(lane); block < first_of(lane + 1); ++block) {
      const Sum own = totals[block];
      totals[block] = before;
      before = before + own;
    }
    if (lane == kScanLanes - 1) totals[blocks] = before;
  }
};

template <class In>
struct TopkTakeGrid {
  const In* src;
  float* error;  ///< src, or null
  std::int64_t n;
  const TopkCut* cut;
  const TopkTotals* totals;
  std::int32_t* places;
  float* values;

  template <class Lanes>
  ZR_HOST_DEVICE void operator()(GridThread warp, const Lanes& lanes) const {
    const TopkBlock<In> elements{src, n, cut->prefix};
    const auto left = static_cast<std::uint32_t>(cut->left);
    for (std::int64_t block = warp.index; block < topk_blocks(n); block += warp.count) {
      TopkTotals before = totals[block];
      const TopkTotals here = totals[block + 1] - before;
      if (here.greater == 0 && (here.ties == 0 || before.ties >= left)) continue;
      for (std::int64_t first = block * kTopkBlock; first < n && first < (block + 1) * kTopkBlock;
           first += kTopkLanes) {
        const std::uint32_t greater = lanes.vote([&](std::int64_t lane) { return elements.is_greater(first + lane); });
        const std::uint32_t ties = lanes.vote([&](std::int64_t lane) { return elements.is_tie(first + lane); });
        lanes.each([&](std::int64_t lane) {
          const std::uint32_t bit = 1U << static_cast<std::uint32_t>(lane);
          const TopkTotals lower =
              before + TopkTotals{lanes.count(greater & (bit - 1U)), lanes.count(ties & (bit - 1U))};
          const bool takes = (greater & bit) != 0 || ((ties & bit) != 0 && lower.ties < left);
          if (!takes) return;
          const std::uint32_t at = lower.greater + (lower.ties < left ? lower.ties : left);
          places[at] = static_cast<std::int32_t>(first + lane);
          topk_message(Lane<float>::load(src + first + lane)).store(values + at);
          if (error != nullptr) error[first + lane] = 0.0F;
        });
        before = before + TopkTotals{lanes.count(greater), lanes.count(ties)};
      }
    }
  }
};

/// Of one source. Its places are distinct.
struct TopkAddGrid {
  float* dst;
  const std::int32_t* places;
  const float* values;
  std::int64_t k;
  float factor;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for (std::int64_t j = thread.index; j < k; j += thread.count) topk_add_element(dst, places[j], values[j], factor);
  }
};

/// How many places of one source a sum does not have.
struct TopkOutsideGrid {
  const std::int32_t* places;
  std::int64_t k;
  std::int64_t n;

  ZR_HOST_DEVICE std::int64_t operator()(GridThread thread) const {
    std::int64_t outside = 0;
    for (std::int64_t j = thread.index; j < k; j += thread.count) outside += places[j] < 0 || places[j] >= n ? 1 : 0;
    return outside;
  }
};

/// `workspace`: topk_workspace_bytes(n), for n > 0.
template <class Launch>
bool topk_on_grid(const TopkArgs& args, void* workspace, Launch& launch) {
  if (args.n < 0 || args.n > kMostTopkElements || args.k < 0 || args.k > args.n || !has_topk(args.src_dtype) ||
      (args.n > 0 && workspace == nullptr)) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  auto* const work = static_cast<TopkWorkspace*>(workspace);
  const std::int64_t counters = args.n < kMostCounters ? args.n : kMostCounters;
  const auto count = [&](const auto* src, float* error, int level, auto makes_message) {
    using In = std::remove_const_t<std::remove_pointer_t<decltype(src)>>;
    launch.count(TopkCountGrid<decltype(makes_message)::kValue, In>{src, error, args.n, work->cuts + level, level,
                                                                    work->counts[level]},
                 counters);
    launch.scan(TopkChooseGrid{work->counts[level], work->cuts + level, work->cuts + level + 1, level});
  };
  const auto rest = [&](const auto* message) {
    using In = std::remove_const_t<std::remove_pointer_t<decltype(message)>>;
    for (int level = 1; level < kTopkLevels; ++level) count(message, nullptr, level, No{});
    const std::int64_t blocks = topk_blocks(args.n);
    const TopkCut* const cut = work->cuts + kTopkLevels;
    launch.warps(TopkSizeGrid<In>{message, args.n, cut, work->totals()}, blocks);
    launch.scan(TopkPlaceGrid{work->totals(), blocks});
    launch.warps(TopkTakeGrid<In>{message, args.error, args.n, cut, work->totals(), args.places, args.values}, blocks);
  };
  launch(TopkStartGrid{work, args.k}, kTopkLevels * kTopkBins);
  const auto all = [&](const auto* src) {
    with_flag(args.error != nullptr, [&](auto has_error) {
      constexpr bool kError = decltype(has_error)::kValue;
      count(src, args.error, 0, has_error);
      if constexpr (kError) {
        rest(static_cast<const float*>(args.error));
      } else {
        rest(src);
      }
    });
  };
  args.src_dtype == DType::kBFloat16  ? all(static_cast<const BFloat16*>(args.src))
  : args.src_dtype == DType::kFloat16 ? all(static_cast<const Float16*>(args.src))
                                      : all(static_cast<const float*>(args.src));
  return true;
}

/// launch(body, threads) adds what the bodies return.
template <class Launch>
bool topk_outside_on_grid(const TopkAddArgs& args, Launch& launch) {
  if (args.n < 0 || args.n > kMostTopkElements || args.num_sources < 0) {
    return false;
  }
  for (int source = 0; source < args.num_sources; ++source) {
    const TopkSource& from = args.sources[source];
    if (from.k > 0) launch(TopkOutsideGrid{from.places, from.k, args.n}, from.k);
  }
  return true;
}

/// All places lie in [0, n). One launch a source: sums are formed in their order.
template <class Launch>
bool topk_add_on_grid(const TopkAddArgs& args, Launch& launch) {
  if (args.n < 0 || args.n > kMostTopkElements || args.num_sources < 0) {
    return false;
  }
  for (int source = 0; source < args.num_sources; ++source) {
    const TopkSource& from = args.sources[source];
    if (from.k > 0) launch(TopkAddGrid{args.dst, from.places, from.values, from.k, args.factor}, from.k);
  }
  return true;
}

}  // namespace
}  // namespace zeroth::kernels
