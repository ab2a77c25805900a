// The threads of a CUDA grid, one after the other on the host: see csrc/kernels/common/grid.h.
#pragma once

#include <kernels/common/grid.h>
#include <kernels/lamb/lamb_grid.h>
#include <kernels/lowrank/lowrank_grid.h>
#include <kernels/norm/norm_grid.h>
#include <kernels/quant/quant_grid.h>
#include <kernels/topk/topk_grid.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>

namespace zeroth::kernels::test {

/// Launches on `threads` threads; the order in which they run is another one in every launch.
class ScrambledThreads {
 public:
  ScrambledThreads(std::int64_t threads, std::uint64_t seed)
      : order_(static_cast<std::size_t>(threads)), engine_(seed) {
    std::iota(order_.begin(), order_.end(), 0);
  }

  template <class Run>
  void each(const Run& run) {
    ++launches;
    std::shuffle(order_.begin(), order_.end(), engine_);
    for (const std::int64_t index : order_) {
      run(GridThread{index, static_cast<std::int64_t>(order_.size())});
    }
  }

  [[nodiscard]] std::int64_t count() const { return static_cast<std::int64_t>(order_.size()); }
  int launches = 0;

 private:
  std::vector<std::int64_t> order_;
  std::mt19937_64 engine_;
};

/// What lanes hold; a shift gives every lane what a shuffle on a device does.
template <class T, std::size_t kLanes>
struct LaneValues {
  std::array<T, kLanes> lane{};

  friend LaneValues operator+(const LaneValues& a, const LaneValues& b) {
    LaneValues sum;
    for (std::size_t l = 0; l < kLanes; ++l) sum.lane[l] = a.lane[l] + b.lane[l];
    return sum;
  }
  static LaneValues shifted(const LaneValues& values, int by) {
    LaneValues result = values;  // past the end a lane gets its own value
    for (std::size_t l = 0; l + static_cast<std::size_t>(by) < kLanes; ++l) {
      result.lane[l] = values.lane[l + static_cast<std::size_t>(by)];
    }
    return result;
  }
};
using Warp = LaneValues<double, kNormLanes>;
template <class T>
using RankSum = LaneValues<T, static_cast<std::size_t>(kRankLanes)>;

/// norm_blocks on such threads; false where it refuses the arguments.
inline bool norm_blocks_on(ScrambledThreads& threads, const void* src, DType dtype, std::int64_t n, double* sums) {
  const auto launch = [&](const auto& body, std::int64_t) {
    std::vector<Warp> warps(static_cast<std::size_t>((n + kNormBlock - 1) / kNormBlock));
    threads.each([&](GridThread thread) {
      body(thread, [&](std::int64_t block, std::int64_t lane, double sum) {
        warps[static_cast<std::size_t>(block)].lane[static_cast<std::size_t>(lane)] = sum;
      });
    });
    for (const Warp& warp : warps) {
      *sums++ = norm_fold(warp, Warp::shifted).lane[0];
    }
  };
  return norm_on_grid(src, dtype, n, sums, launch);
}

/// quantize on such threads, as many as there are lanes of warps; `launch` runs its second part. False where it refuses
/// the arguments.
template <class Launch>
bool quantize_on(ScrambledThreads& threads, const QuantizeArgs& args, Launch& launch) {
  const auto scales = [&](const auto& body, std::int64_t) {
    std::vector<float> greatest(static_cast<std::size_t>(code_blocks(args.n, args.block)));
    threads.each([&](GridThread thread) {
      body(thread, [&](std::int64_t block, std::int64_t, float of_lane) {
        float& most = greatest[static_cast<std::size_t>(block)];
        most = Lane<float>::greater(Lane<float>{most}, Lane<float>{of_lane}).v;
      });
    });
    for (std::size_t block = 0; block < greatest.size(); ++block)
      body.finish(static_cast<std::int64_t>(block), greatest[block]);
  };
  return quantize_on_grid(args, scales, launch);
}

/// lamb_measure on such threads, as many as there are lanes of warps; false where it refuses the arguments.
inline bool lamb_measure_on(ScrambledThreads& threads, const LambArgs& args) {
  const auto launch = [&](const auto& body, std::int64_t) {
    const auto blocks = static_cast<std::size_t>((args.n + kNormBlock - 1) / kNormBlock);
    std::vector<Warp> of_param(blocks);
    std::vector<Warp> of_update(blocks);
    threads.each([&](GridThread thread) {
      body(thread, [&](std::int64_t block, std::int64_t lane, double param, double update) {
        of_param[static_cast<std::size_t>(block)].lane[static_cast<std::size_t>(lane)] = param;
        of_update[static_cast<std::size_t>(block)].lane[static_cast<std::size_t>(lane)] = update;
      });
    });
    for (std::size_t block = 0; block < blocks; ++block) {
      if constexpr (std::decay_t<decltype(body)>::kGreatest) {
        double most = 0.0;
        for (const double one : of_update[block].lane) most = lamb_greater(most, one);
        body.update_measure[block] = most;
      } else {
        body.param_squares[block] = norm_fold(of_param[block], Warp::shifted).lane[0];
        body.update_measure[block] = norm_fold(of_update[block], Warp::shifted).lane[0];
      }
    }
  };
  return lamb_measure_on_grid(args, launch);
}

/// What the threads of a warp or of a block do together, one after the other in some order.
class ScrambledLanes {
 public:
  explicit ScrambledLanes(ScrambledThreads& threads) : threads_(threads) {}

  template <class Is>
  [[nodiscard]] std::uint32_t vote(const Is& is) const {
    std::uint32_t mask = 0;
    each([&](std::int64_t lane) { mask |= is(lane) ? 1U << static_cast<std::uint32_t>(lane) : 0U; });
    return mask;
  }
  template <class Each>
  void each(const Each& each) const {
    threads_.each([&](GridThread thread) { each(thread.index); });
  }
  [[nodiscard]] std::uint32_t count(std::uint32_t mask) const {
    return static_cast<std::uint32_t>(__builtin_popcount(mask));
  }

 private:
  ScrambledThreads& threads_;
};

/// The threads of a block: see lowrank_grid.h.
class ScrambledTeam {
 public:
  ScrambledTeam(std::int64_t number, std::int64_t teams, ScrambledThreads& threads)
      : index(number), count(teams), threads_(threads) {}

  template <class Each>
  void each(const Each& each) const {
    threads_.each([&](GridThread thread) { each(thread.index, thread.count); });
  }
  template <class OfLane>
  [[nodiscard]] double folded(const OfLane& of_lane) const {
    RankSum<double> sum;
    for (std::int64_t lane = kRankLanes; lane-- > 0;) sum.lane[static_cast<std::size_t>(lane)] = of_lane(lane);
    return rank_fold(sum, RankSum<double>::shifted).lane[0];
  }
  template <class Is>
  [[nodiscard]] bool all(const Is& is) const {
    bool are = true;
    each([&](std::int64_t thread, std::int64_t threads) { are = is(thread, threads) && are; });
    return are;
  }

  const std::int64_t index;
  const std::int64_t count;

 private:
  ScrambledThreads& threads_;
};

/// Every form of launch of topk_grid.h and lowrank_grid.h on such threads, as many as are asked for: of a grid, of
/// warps, of groups of lanes, or of a team.
class ScrambledLaunch {
 public:
  ScrambledLaunch(ScrambledThreads& threads, std::uint64_t seed)
      : threads_(threads),
        warp_(kTopkLanes, seed),
        scan_(kScanLanes, seed + 1),
        groups_(threads.count() * kRankLanes, seed + 2) {}

  template <class Body>
  void operator()(const Body& body, std::int64_t) {
    threads_.each(body);
  }
  template <class Body>
  void count(const Body& body, std::int64_t) {
    threads_.each([&](GridThread thread) { body(thread, [&](std::uint32_t digit) { ++body.counts[digit]; }); });
  }
  template <class Body>
  void scan(const Body& body) {
    ++threads_.launches;
    std::vector<typename Body::Sum> before(static_cast<std::size_t>(kScanLanes) + 1);
    for (std::int64_t lane = 0; lane < kScanLanes; ++lane)
      before[static_cast<std::size_t>(lane) + 1] = before[static_cast<std::size_t>(lane)] + body.sum(lane);
    scan_.each([&](GridThread lane) { body.finish(lane.index, before[static_cast<std::size_t>(lane.index)]); });
  }
  template <class Body>
  void warps(const Body& body, std::int64_t) {
    threads_.each([&](GridThread warp) { body(warp, ScrambledLanes(warp_)); });
  }
  template <class Body>
  void lanes(const Body& body, std::int64_t) {
    ++threads_.launches;
    std::map<std::int64_t, RankSum<float>> sums;
    groups_.each([&](GridThread thread) {
      body(thread, [&](std::int64_t element, std::int64_t lane, float of_lane) {
        sums[element].lane[static_cast<std::size_t>(lane)] = of_lane;
      });
    });
    for (const auto& [element, sum] : sums) body.finish(element, rank_fold(sum, RankSum<float>::shifted).lane[0]);
  }
  template <class Body>
  void teams(const Body& body, std::int64_t teams) {
    ++threads_.launches;
    ScrambledThreads order(teams, static_cast<std::uint64_t>(teams));
    order.each([&](GridThread team) { body(ScrambledTeam(team.index, team.count, threads_)); });
  }

 private:
  ScrambledThreads& threads_;
  ScrambledThreads warp_;
  ScrambledThreads scan_;
  ScrambledThreads groups_;
};

/// Launches nothing: whether arguments are taken.
struct NoLaunch {
  template <class Body>
  void operator()(const Body&, std::int64_t) const {}
  template <class Body>
  void count(const Body&, std::int64_t) const {}
  template <class Body>
  void scan(const Body&) const {}
  template <class Body>
  void warps(const Body&, std::int64_t) const {}
  template <class Body>
  void lanes(const Body&, std::int64_t) const {}
  template <class Body>
  void teams(const Body&, std::int64_t) const {}
};

}  // namespace zeroth::kernels::test
