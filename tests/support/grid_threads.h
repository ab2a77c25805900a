// The threads of a CUDA grid, one after the other on the host: see csrc/kernels/common/grid.h.
#pragma once

#include <kernels/common/grid.h>
#include <kernels/lamb/lamb_grid.h>
#include <kernels/norm/norm_grid.h>
#include <kernels/quant/quant_grid.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
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

/// What the lanes of a warp hold; a shift gives every lane what a shuffle on a device does.
struct Warp {
  std::array<double, kNormLanes> lane{};

  friend Warp operator+(const Warp& a, const Warp& b) {
    Warp sum;
    for (std::size_t l = 0; l < sum.lane.size(); ++l) sum.lane[l] = a.lane[l] + b.lane[l];
    return sum;
  }
  static Warp shifted(const Warp& warp, int by) {
    Warp result = warp;  // past the end a lane gets its own value
    for (std::size_t l = 0; l + static_cast<std::size_t>(by) < warp.lane.size(); ++l) {
      result.lane[l] = warp.lane[l + static_cast<std::size_t>(by)];
    }
    return result;
  }
};

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

}  // namespace zeroth::kernels::test
