// lowrank.h on a grid, see common/grid.h. Sums have the orders that are written there: the sixteen lanes of a sum are
// threads, or one thread goes through the rows. Bodies have two forms besides that of grid.h, which are given what a
// device does with several threads at once:
//
//   launch.lanes(body, threads)  body(GridThread, deliver), a multiple of kRankLanes threads: deliver(element, lane,
//                                a_l) of all lanes; then body.finish(element, rank_fold() of them)
//   launch.teams(body, teams)    body(team), team number `index` of `count`: team.each(f) calls f(thread, threads) of
//                                all its threads and waits for them, team.folded(f) is rank_fold() of f(lane) of the
//                                lanes, team.all(f) is true if f(thread, threads) is of all. All threads have the
//                                results.
#pragma once

#include <kernels/common/grid.h>
#include <kernels/lowrank/lowrank_math.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Columns of a factor that one thread handles at once: the matrix is read once for all of them.
inline constexpr int kRankTile = 4;

/// The sum of the lanes, in lane 0. down(lanes, by): what lies `by` lanes further.
template <class Lanes, class Down>
ZR_HOST_DEVICE ZR_INLINE Lanes rank_fold(Lanes lanes, const Down& down) {
  for (int half = static_cast<int>(kRankLanes) / 2; half > 0; half /= 2) lanes = lanes + down(lanes, half);
  return lanes;
}

/// A lane's part of the sum over [0, n) of a[i] b[i], of kSums sums with the same a. b(sum, i).
template <class T, int kSums, class B>
ZR_HOST_DEVICE ZR_INLINE void add_lane(const float* a, const B& b, std::int64_t n, std::int64_t lane,
                                       Lane<T> (&sums)[kSums]) {
  for (auto& sum : sums) sum = Lane<T>::splat(0);
  for (std::int64_t first = 0; first < n; first += kRankLanes) {
    const std::int64_t i = first + lane;
    const bool is_there = i < n;  // else a zero
    const auto of_a = is_there ? Lane<T>::load(a + i) : Lane<T>::splat(0);
    for (int k = 0; k < kSums; ++k) sums[k] = fused(of_a, is_there ? b(k, i) : Lane<T>::splat(0), sums[k]);
  }
}

/// A group of lanes has a row and a tile of columns of Q.
struct LowRankProductGrid {
  LowRankProductArgs args;

  template <class Deliver>
  ZR_HOST_DEVICE void operator()(GridThread thread, const Deliver& deliver) const {
    const std::int64_t lane = thread.index % kRankLanes;
    const std::int64_t groups = thread.count / kRankLanes;
    const std::int64_t tiles = (args.shape.rank + kRankTile - 1) / kRankTile;
    for (std::int64_t item = thread.index / kRankLanes; item < args.shape.rows * tiles; item += groups) {
      const std::int64_t row = item / tiles;
      const std::int64_t first = item % tiles * kRankTile;
      const std::int64_t last = args.shape.rank - 1;
      Lane<float> sums[kRankTile];
      // Past the last column it is summed again, and not delivered.
      const auto factor = [&](int k, std::int64_t i) {
        const std::int64_t column = first + k < last ? first + k : last;
        return Lane<float>::load(args.factor + column * args.factor_stride + i);
      };
      add_lane<float>(args.matrix + row * args.shape.stride, factor, args.shape.columns, lane, sums);
      for (int k = 0; k < kRankTile && first + k <= last; ++k)
        deliver((first + k) * args.shape.rows + row, lane, sums[k].v);
    }
  }
  /// Elements are numbered column by column.
  ZR_HOST_DEVICE void finish(std::int64_t element, float sum) const {
    const std::int64_t column = element / args.shape.rows;
    canonical(Lane<float>{sum}).store(args.result + column * args.result_stride + element % args.shape.rows);
  }
};

/// A thread has a column of M and a tile of columns of P.
struct LowRankTransposedGrid {
  LowRankProductArgs args;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    const std::int64_t tiles = (args.shape.rank + kRankTile - 1) / kRankTile;
    for (std::int64_t item = thread.index; item < args.shape.columns * tiles; item += thread.count) {
      const std::int64_t c = item % args.shape.columns;
      const std::int64_t first = item / args.shape.columns * kRankTile;
      const std::int64_t last = args.shape.rank - 1;
      Lane<float> sums[kRankTile] = {};
      for (std::int64_t row = 0; row < args.shape.rows; ++row) {
        const auto of_matrix = Lane<float>::load(args.matrix + row * args.shape.stride + c);
        for (int k = 0; k < kRankTile; ++k) {
          const std::int64_t column = first + k < last ? first + k : last;
          sums[k] = fused(of_matrix, Lane<float>::load(args.factor + column * args.factor_stride + row), sums[k]);
        }
      }
      for (int k = 0; k < kRankTile && first + k <= last; ++k)
        canonical(sums[k]).store(args.result + (first + k) * args.result_stride + c);
    }
  }
};

struct LowRankRestoreGrid {
  LowRankRestoreArgs args;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for (std::int64_t i = thread.index; i < args.shape.rows * args.shape.columns; i += thread.count) {
      const std::int64_t row = i / args.shape.columns;
      const std::int64_t c = i % args.shape.columns;
      const std::int64_t at = row * args.shape.stride + c;
      const auto value = restored<Lane<float>>(args, row, c);
      if (args.result != nullptr) value.store(args.result + at);
      if (args.error != nullptr) canonical(Lane<float>::load(args.error + at) - value).store(args.error + at);
    }
  }
};

/// One team: each column needs those before it.
struct OrthonormalizeGrid {
  OrthonormalizeArgs args;

  template <class Team>
  ZR_HOST_DEVICE void operator()(const Team& team) const {
    for (int j = 0; team.index == 0 && j < args.rank; ++j) {
      float* const column = args.columns + j * args.stride;
      const double before = product(team, column, column);
      for (int k = 0; k < j; ++k) {
        const float* const other = args.columns + k * args.stride;
        const auto part = Lane<double>::splat(-product(team, other, column));
        team.each([&](std::int64_t thread, std::int64_t threads) {
          for (std::int64_t i = thread; i < args.rows; i += threads)
            fused(part, Lane<double>::load(other + i), Lane<double>::load(column + i)).store(column + i);
        });
      }
      const ColumnLeft what = column_left(before, product(team, column, column));
      team.each([&](std::int64_t thread, std::int64_t threads) {
        for (std::int64_t i = thread; i < args.rows; i += threads)
          normal_of(Lane<double>::load(column + i), what).store(column + i);
      });
    }
  }

 private:
  template <class Team>
  ZR_HOST_DEVICE double product(const Team& team, const float* a, const float* b) const {
    return team.folded([&](std::int64_t lane) {
      Lane<double> sums[1];
      add_lane<double>(a, [b](int, std::int64_t i) { return Lane<double>::load(b + i); }, args.rows, lane, sums);
      return sums[0].v;
    });
  }
};

/// A team has a column.
struct LowRankDrawGrid {
  LowRankDrawArgs args;

  template <class Team>
  ZR_HOST_DEVICE void operator()(const Team& team) const {
    for (std::int64_t j = team.index; j < args.rank; j += team.count) {
      float* const column = args.columns + j * args.stride;
      const bool is_missing = team.all([&](std::int64_t thread, std::int64_t threads) {
        bool zeros = true;
        for (std::int64_t i = thread; i < args.n && zeros; i += threads) zeros = column[i] == 0.0F;
        return zeros;
      });
      if (!is_missing) continue;
      team.each([&](std::int64_t thread, std::int64_t threads) {
        for (std::int64_t i = thread; i < args.n; i += threads)
          column[i] = drawn(args.seed + static_cast<std::uint32_t>(j), i);
      });
    }
  }
};

constexpr bool is_lowrank(const LowRankShape& shape) {
  return is_matrix(shape) && has_rank(shape.rank);
}

template <class Launch>
bool lowrank_product_on_grid(const LowRankProductArgs& args, Launch& launch) {
  if (!is_lowrank(args.shape)) {
    return false;
  }
  const std::int64_t tiles = (args.shape.rank + kRankTile - 1) / kRankTile;
  if (args.shape.rows > 0) launch.lanes(LowRankProductGrid{args}, args.shape.rows * tiles * kRankLanes);
  return true;
}

template <class Launch>
bool lowrank_transposed_on_grid(const LowRankProductArgs& args, Launch& launch) {
  if (!is_lowrank(args.shape)) {
    return false;
  }
  const std::int64_t tiles = (args.shape.rank + kRankTile - 1) / kRankTile;
  if (args.shape.columns > 0) launch(LowRankTransposedGrid{args}, args.shape.columns * tiles);
  return true;
}

template <class Launch>
bool lowrank_restore_on_grid(const LowRankRestoreArgs& args, Launch& launch) {
  if (!is_lowrank(args.shape)) {
    return false;
  }
  const std::int64_t elements = args.shape.rows * args.shape.columns;
  if (elements > 0) launch(LowRankRestoreGrid{args}, elements);
  return true;
}

template <class Launch>
bool lowrank_orthonormalize_on_grid(const OrthonormalizeArgs& args, Launch& launch) {
  if (!is_lowrank(shape_of_factor(args.rows, args.stride, args.rank))) {
    return false;
  }
  if (args.rows > 0) launch.teams(OrthonormalizeGrid{args}, 1);
  return true;
}

template <class Launch>
bool lowrank_draw_missing_on_grid(const LowRankDrawArgs& args, Launch& launch) {
  if (!is_lowrank(shape_of_factor(args.n, args.stride, args.rank))) {
    return false;
  }
  if (args.n > 0) launch.teams(LowRankDrawGrid{args}, args.rank);
  return true;
}

}  // namespace
}  // namespace zeroth::kernels
