#include "kernel_test_support.h"

#include <kernels/lowrank/lowrank.h>
#include <zeroth/base/error.h>

#include <array>
#include <cmath>
#include <vector>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

/// A sum over [0, n) in the order of lowrank.h: sixteen lanes, then folded.
template <class T, class A, class B>
T sum_of_lanes(std::int64_t n, const A& a, const B& b) {
  std::array<T, 16> lanes{};
  for (std::int64_t i = 0; i < (n + 15) / 16 * 16; ++i) {
    T& lane = lanes[static_cast<std::size_t>(i % 16)];
    lane = i < n ? std::fma(static_cast<T>(a(i)), static_cast<T>(b(i)), lane) : std::fma(T(0), T(0), lane);
  }
  for (std::size_t half = 8; half > 0; half /= 2) {
    for (std::size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

struct Case {
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t stride;
  int rank;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::int64_t rows : {0, 1, 5, 33}) {
    for (const std::int64_t columns : {0, 1, 15, 16, 47, 130}) {
      for (const int rank : {1, 2, 4, 7}) all.push_back({rows, columns, columns + (rows % 2) * 3, rank});
    }
  }
  return all;
}

TEST(LowRank, ProductsAreThoseOfTheOracleAtEveryWidth) {
  RandomPatterns random(kSeed);
  for (const Case& c : cases()) {
    for (const bool ordinary : {true, false}) {
      GuardedArray<float> m(c.rows * c.stride, 1);
      GuardedArray<float> q(c.rank * c.columns, 1);
      GuardedArray<float> p(c.rank * c.rows, 1);
      for (auto* array : {&m, &q, &p}) {
        random.fill(*array);
        if (ordinary) fill_moderate(*array, 2.0, random.engine()());
      }
      const LowRankShape shape{c.rows, c.columns, c.stride, c.rank};
      const std::int64_t rank = c.rank;
      GuardedArray<float> want_p(rank * c.rows);
      GuardedArray<float> want_q(rank * c.columns);
      GuardedArray<float> want(c.rows * c.stride);
      GuardedArray<float> want_error(c.rows * c.stride);
      std::copy_n(m.data(), m.size(), want_error.data());
      for (std::int64_t j = 0; j < rank; ++j) {
        for (std::int64_t i = 0; i < c.rows; ++i) {
          want_p[j * c.rows + i] = canonical_nan(sum_of_lanes<float>(
              c.columns, [&](std::int64_t k) { return m[i * c.stride + k]; },
              [&](std::int64_t k) { return q[j * c.columns + k]; }));
        }
        for (std::int64_t k = 0; k < c.columns; ++k) {
          float sum = 0.0F;
          for (std::int64_t i = 0; i < c.rows; ++i) sum = std::fma(m[i * c.stride + k], p[j * c.rows + i], sum);
          want_q[j * c.columns + k] = canonical_nan(sum);
        }
      }
      for (std::int64_t i = 0; i < c.rows; ++i) {
        for (std::int64_t k = 0; k < c.columns; ++k) {
          float sum = p[i] * q[k];
          for (std::int64_t j = 1; j < rank; ++j) sum = std::fma(p[j * c.rows + i], q[j * c.columns + k], sum);
          want[i * c.stride + k] = canonical_nan(sum);
          want_error[i * c.stride + k] = canonical_nan(m[i * c.stride + k] - canonical_nan(sum));
        }
      }
      for (const Isa isa : supported_isas()) {
        GuardedArray<float> got_p(rank * c.rows, 1);
        GuardedArray<float> got_q(rank * c.columns, 1);
        GuardedArray<float> got(c.rows * c.stride, 1);
        GuardedArray<float> got_error(c.rows * c.stride, 1);
        std::copy_n(m.data(), m.size(), got_error.data());
        lowrank_product({.shape = shape,
                         .matrix = m.data(),
                         .factor = q.data(),
                         .factor_stride = c.columns,
                         .result = got_p.data(),
                         .result_stride = c.rows},
                        isa);
        ASSERT_TRUE(same_bits(want_p, got_p)) << name_of(isa) << " " << c.rows << " x " << c.columns;
        lowrank_transposed_product({.shape = shape,
                                    .matrix = m.data(),
                                    .factor = p.data(),
                                    .factor_stride = c.rows,
                                    .result = got_q.data(),
                                    .result_stride = c.columns},
                                   isa);
        ASSERT_TRUE(same_bits(want_q, got_q)) << name_of(isa) << " " << c.rows << " x " << c.columns;
        lowrank_restore({.shape = shape,
                         .p = p.data(),
                         .p_stride = c.rows,
                         .q = q.data(),
                         .q_stride = c.columns,
                         .result = got.data(),
                         .error = got_error.data()},
                        isa);
        ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " " << c.rows << " x " << c.columns;
        ASSERT_TRUE(same_bits(want_error, got_error)) << name_of(isa) << " " << c.rows << " x " << c.columns;
      }
    }
  }
}

TEST(LowRank, ProductsAreCloseToThoseInDouble) {
  constexpr std::int64_t kRows = 37;
  constexpr std::int64_t kColumns = 1001;
  GuardedArray<float> m(kRows * kColumns);
  GuardedArray<float> q(kColumns);
  GuardedArray<float> p(kRows);
  fill_moderate(m, 1.0, kSeed);
  fill_moderate(q, 1.0, kSeed + 1);
  lowrank_product({.shape = {kRows, kColumns, kColumns, 1},
                   .matrix = m.data(),
                   .factor = q.data(),
                   .factor_stride = kColumns,
                   .result = p.data(),
                   .result_stride = kRows},
                  best_isa());
  for (std::int64_t i = 0; i < kRows; ++i) {
    double sum = 0.0;
    double sizes = 0.0;
    for (std::int64_t c = 0; c < kColumns; ++c) {
      const double one = static_cast<double>(m[i * kColumns + c]) * static_cast<double>(q[c]);
      sum += one;
      sizes += std::fabs(one);
    }
    // 63 additions of a lane and 4 of the fold, each off by half a unit of the sum of sizes at most.
    EXPECT_NEAR(p[i], sum, 67 * 0x1p-24 * sizes);
  }
}

TEST(LowRank, ColumnsBecomeOrthonormalWithTheSameBits) {
  for (const std::int64_t rows : {1, 7, 16, 50, 1003}) {
    for (const int rank : {1, 2, 5}) {
      GuardedArray<float> given(rank * rows);
      fill_moderate(given, 3.0, kSeed + static_cast<std::uint64_t>(rows));
      GuardedArray<float> want(rank * rows);
      int spanned = -1;
      for (const Isa isa : supported_isas()) {
        GuardedArray<float> got(rank * rows, 1);
        std::copy_n(given.data(), given.size(), got.data());
        const int count =
            lowrank_orthonormalize({.columns = got.data(), .rows = rows, .stride = rows, .rank = rank}, isa);
        if (isa == Isa::kScalar) {
          std::copy_n(got.data(), got.size(), want.data());
          spanned = count;
        }
        ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " " << rows << " rows, rank " << rank;
        ASSERT_EQ(count, spanned);
      }
      // More columns than rows have no room.
      EXPECT_EQ(spanned, std::max<std::int64_t>(0, rank - rows));
      for (std::int64_t j = 0; j < rank; ++j) {
        for (std::int64_t k = 0; k <= j; ++k) {
          double product = 0.0;
          for (std::int64_t i = 0; i < rows; ++i)
            product += static_cast<double>(want[j * rows + i]) * static_cast<double>(want[k * rows + i]);
          EXPECT_NEAR(product, j == k && j < rows ? 1.0 : 0.0, 1e-5) << rows << " rows, columns " << j << " " << k;
        }
      }
    }
  }
}

TEST(LowRank, ColumnsInTheSpanOfOthersBecomeZerosAndNanSpreads) {
  constexpr std::int64_t kRows = 40;
  for (const Isa isa : supported_isas()) {
    GuardedArray<float> columns(4 * kRows);
    fill_moderate(columns, 1.0, kSeed + 5);
    for (std::int64_t i = 0; i < kRows; ++i) {
      columns[kRows + i] = 0.0F;
      columns[2 * kRows + i] = -3.0F * columns[i];
    }
    EXPECT_EQ(lowrank_orthonormalize({.columns = columns.data(), .rows = kRows, .stride = kRows, .rank = 4}, isa), 2);
    for (std::int64_t i = 0; i < kRows; ++i) {
      EXPECT_EQ(columns[kRows + i], 0.0F);
      EXPECT_EQ(columns[2 * kRows + i], 0.0F);
    }
    columns[kRows + 3] = INFINITY;
    EXPECT_EQ(lowrank_orthonormalize({.columns = columns.data(), .rows = kRows, .stride = kRows, .rank = 4}, isa), 0);
    for (std::int64_t i = kRows; i < 4 * kRows; ++i) EXPECT_EQ(bits_of(columns[i]), 0x7fc00000U) << i;
  }
}

TEST(LowRank, ColumnsThatAreZerosAreDrawnAnewAndNoOther) {
  constexpr std::int64_t kElements = 37;
  constexpr std::int64_t kStride = 40;
  GuardedArray<float> columns(4 * kStride);
  fill_moderate(columns, 1.0, kSeed);
  for (std::int64_t i = 0; i < kElements; ++i) {
    columns[kStride + i] = i % 2 == 0 ? 0.0F : -0.0F;
    columns[2 * kStride + i] = 0.0F;
    columns[3 * kStride + i] = 0.0F;
  }
  columns[3 * kStride + kElements - 1] = NAN;
  GuardedArray<float> want(columns.size());
  std::copy_n(columns.data(), columns.size(), want.data());
  lowrank_draw(want.data() + kStride, kElements, 8);
  lowrank_draw(want.data() + 2 * kStride, kElements, 9);
  lowrank_draw_missing({.columns = columns.data(), .n = kElements, .stride = kStride, .rank = 4, .seed = 7});
  EXPECT_TRUE(same_bits(want, columns));
  EXPECT_EQ(code_of([] { lowrank_draw_missing({.n = 2, .stride = 1}); }), ErrorCode::kUsage);
}

/// Steps of PowerSGD with one rank; returns what the last step leaves of the matrix, relative to its length.
double left_after(const GuardedArray<float>& m, std::int64_t rows, std::int64_t columns, int rank, int steps) {
  GuardedArray<float> p(rank * rows);
  GuardedArray<float> q(rank * columns);
  GuardedArray<float> left(rows * columns);
  for (int j = 0; j < rank; ++j) lowrank_draw(q.data() + j * columns, columns, static_cast<std::uint32_t>(j) + 1);
  const LowRankShape shape{rows, columns, columns, rank};
  const Isa isa = best_isa();
  for (int step = 0; step < steps; ++step) {
    std::copy_n(m.data(), m.size(), left.data());
    LowRankProductArgs args{.shape = shape,
                            .matrix = left.data(),
                            .factor = q.data(),
                            .factor_stride = columns,
                            .result = p.data(),
                            .result_stride = rows};
    lowrank_product(args, isa);
    lowrank_orthonormalize({.columns = p.data(), .rows = rows, .stride = rows, .rank = rank}, isa);
    args.factor = p.data();
    args.factor_stride = rows;
    args.result = q.data();
    args.result_stride = columns;
    lowrank_transposed_product(args, isa);
    lowrank_restore(
        {.shape = shape, .p = p.data(), .p_stride = rows, .q = q.data(), .q_stride = columns, .error = left.data()},
        isa);
  }
  double rest = 0.0;
  double all = 0.0;
  for (std::int64_t i = 0; i < m.size(); ++i) {
    rest += std::pow(static_cast<double>(left[i]), 2);
    all += std::pow(static_cast<double>(m[i]), 2);
  }
  return std::sqrt(rest / all);
}

TEST(LowRank, RestoresMatricesOfItsRankAndTheGreatestPartOfOthers) {
  constexpr std::int64_t kRows = 60;
  constexpr std::int64_t kColumns = 45;
  GuardedArray<float> factors(4 * (kRows + kColumns));
  fill_moderate(factors, 1.0, kSeed + 6);
  GuardedArray<float> m(kRows * kColumns);
  for (std::int64_t i = 0; i < kRows; ++i) {
    for (std::int64_t c = 0; c < kColumns; ++c) {
      float sum = 0.0F;
      for (std::int64_t j = 0; j < 4; ++j)
        sum += factors[j * kRows + i] * factors[4 * kRows + j * kColumns + c] * static_cast<float>(std::pow(4.0, -j));
      m[i * kColumns + c] = sum;
    }
  }
  EXPECT_LT(left_after(m, kRows, kColumns, 4, 2), 1e-5);
  // Singular values fall by about 4: rank 2 leaves about 1/16.
  EXPECT_LT(left_after(m, kRows, kColumns, 2, 5), 0.12);
  EXPECT_GT(left_after(m, kRows, kColumns, 2, 5), 0.01);
}

TEST(LowRank, ThatCannotBeIsRefused) {
  const Isa isa = best_isa();
  EXPECT_EQ(code_of([&] { lowrank_product({.shape = {.rows = -1}}, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { lowrank_product({.shape = {.columns = 2, .stride = 1}}, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { lowrank_transposed_product({.shape = {.rank = 0}}, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { lowrank_restore({.shape = {.rank = 65}}, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { lowrank_orthonormalize({.rows = 2, .stride = 1}, isa); }), ErrorCode::kUsage);
}

}  // namespace
}  // namespace zeroth::kernels
