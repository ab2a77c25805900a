// Memory access of lowrank.h; included once per instruction set.
#include <kernels/common/loops.h>
#include <kernels/lowrank/lowrank_math.h>
#include <kernels/lowrank/lowrank_variants.h>

namespace zeroth::kernels {
namespace {

template <int kNumber>
struct Tile {
  static constexpr int kValue = kNumber;
};

/// Calls body(Tile<4>{}, at), and Tile<1> for the rest, for tiles of [0, n).
template <class Body>
ZR_INLINE void for_each_tile(std::int64_t n, const Body& body) {
  std::int64_t at = 0;
  for (; at + 4 <= n; at += 4) body(Tile<4>{}, at);
  for (; at < n; ++at) body(Tile<1>{}, at);
}

/// The last elements of a row or column, with zeros after them.
struct PaddedTail {
  alignas(64) float element[kRankLanes] = {};

  ZR_INLINE PaddedTail(const float* from, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) element[i] = from[i];
  }
};

/// kRows rows times kRanks columns of Q: each piece of a row is read once, and each of Q for all rows.
template <class W, int kRows, int kRanks>
ZR_INLINE void product_tile(const LowRankProductArgs& args, std::int64_t row, std::int64_t rank) {
  RankLanes<W> sums[kRows][kRanks];
  for (auto& of_row : sums) {
    for (auto& sum : of_row) sum.clear();
  }
  const float* const m = args.matrix + row * args.shape.stride;
  const float* const q = args.factor + rank * args.factor_stride;
  const std::int64_t whole = args.shape.columns / kRankLanes * kRankLanes;
  for (std::int64_t c = 0; c < whole; c += kRankLanes) {
    for (int j = 0; j < kRanks; ++j) {
      for (int i = 0; i < kRows; ++i) sums[i][j].add(m + i * args.shape.stride + c, q + j * args.factor_stride + c);
    }
  }
  const std::int64_t rest = args.shape.columns - whole;
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kRanks; ++j) {
      if (rest > 0) {
        const PaddedTail a(m + i * args.shape.stride + whole, rest);
        const PaddedTail b(q + j * args.factor_stride + whole, rest);
        sums[i][j].add(a.element, b.element);
      }
      canonical(Lane<float>{sums[i][j].folded()}).store(args.result + (rank + j) * args.result_stride + row + i);
    }
  }
}

template <template <class> class V>
void product_any(const LowRankProductArgs& args) {
  using W = V<float>;
  const auto of_ranks = [&](auto rows, std::int64_t row) {
    for_each_tile(args.shape.rank, [&](auto ranks, std::int64_t rank) {
      product_tile<W, decltype(rows)::kValue, decltype(ranks)::kValue>(args, row, rank);
    });
  };
  if constexpr (RankLanes<W>::kVectors == 1) {
    for_each_tile(args.shape.rows, of_ranks);
  } else {  // the registers have the sums of one row
    for (std::int64_t row = 0; row < args.shape.rows; ++row) of_ranks(Tile<1>{}, row);
  }
}

template <template <class> class V>
void transposed_any(const LowRankProductArgs& args) {
  for (int j = 0; j < args.shape.rank; ++j) {
    __builtin_memset(args.result + j * args.result_stride, 0,
                     static_cast<std::size_t>(args.shape.columns) * sizeof(float));
  }
  for_each_tile(args.shape.rows, [&](auto rows, std::int64_t row) {
    constexpr int kRows = decltype(rows)::kValue;
    const float* const m = args.matrix + row * args.shape.stride;
    for_each_vector<V, float>(0, args.shape.columns, [&](auto width, std::int64_t c) {
      using W = typename decltype(width)::Vector;
      W of_row[kRows];
      for (int i = 0; i < kRows; ++i) of_row[i] = W::load(m + i * args.shape.stride + c);
      for (int j = 0; j < args.shape.rank; ++j) {
        const float* const p = args.factor + j * args.factor_stride + row;
        float* const at = args.result + j * args.result_stride + c;
        W sum = W::load(at);
        for (int i = 0; i < kRows; ++i) sum = fused(of_row[i], W::splat(p[i]), sum);
        canonical(sum).store(at);
      }
    });
  });
}

template <template <class> class V>
void restore_any(const LowRankRestoreArgs& args) {
  with_flag(args.result != nullptr, [&](auto has_result) {
    with_flag(args.error != nullptr, [&](auto has_error) {
      for (std::int64_t row = 0; row < args.shape.rows; ++row) {
        for_each_vector<V, float>(0, args.shape.columns, [&](auto width, std::int64_t c) {
          using W = typename decltype(width)::Vector;
          const W sum = restored<W>(args, row, c);
          const std::int64_t at = row * args.shape.stride + c;
          if constexpr (decltype(has_result)::kValue) sum.store(args.result + at);
          if constexpr (decltype(has_error)::kValue) canonical(W::load(args.error + at) - sum).store(args.error + at);
        });
      }
    });
  });
}

template <class D>
ZR_INLINE double column_product(const float* a, const float* b, std::int64_t n) {
  RankLanes<D> sum;
  sum.clear();
  const std::int64_t whole = n / kRankLanes * kRankLanes;
  for (std::int64_t i = 0; i < whole; i += kRankLanes) sum.add(a + i, b + i);
  if (whole < n) {
    const PaddedTail a_tail(a + whole, n - whole);
    const PaddedTail b_tail(b + whole, n - whole);
    sum.add(a_tail.element, b_tail.element);
  }
  return sum.folded();
}

template <template <class> class V>
int orthonormalize_any(const OrthonormalizeArgs& args) {
  using D = V<double>;
  int spanned = 0;
  for (int j = 0; j < args.rank; ++j) {
    float* const column = args.columns + j * args.stride;
    const double before = column_product<D>(column, column, args.rows);
    for (int k = 0; k < j; ++k) {
      const float* const other = args.columns + k * args.stride;
      const double part = -column_product<D>(other, column, args.rows);
      for_each_vector<V, double>(0, args.rows, [&](auto width, std::int64_t i) {
        using W = typename decltype(width)::Vector;
        fused(W::splat(part), W::load(other + i), W::load(column + i)).store(column + i);
      });
    }
    const double left = column_product<D>(column, column, args.rows);
    const ColumnLeft what = column_left(before, left);
    spanned += what.is_spanned ? 1 : 0;
    for_each_vector<V, double>(0, args.rows, [&](auto width, std::int64_t i) {
      using W = typename decltype(width)::Vector;
      normal_of(W::load(column + i), what).store(column + i);
    });
  }
  return spanned;
}

}  // namespace
}  // namespace zeroth::kernels
