// Rows of a table: what is gathered, in float32 and 8 bits, and what is updated, for any number of threads.
#include "support/error_of.h"

#include <zeroth/base/error.h>
#include <zeroth/offload/host_rows.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

namespace zeroth {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr RowShape kShape{.rows = 37, .dim = 19};

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> values;
  std::vector<float> result(count);
  std::ranges::generate(result, [&] { return values(random); });
  return result;
}

std::vector<std::int64_t> random_rows(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::int64_t> result(count);
  std::ranges::generate(result, [&] { return static_cast<std::int64_t>(random() % 37U); });
  return result;
}

TEST(HostRows, AreGatheredInTheOrderOfTheIndices) {
  const std::vector<float> table = random_values(37 * 19, 1);
  const std::vector<std::int64_t> indices = random_rows(500, 2);
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    std::vector<float> out(500 * 19);
    gather_rows(table.data(), kShape, indices, out.data(), pool);
    for (std::size_t i = 0; i < indices.size(); ++i)
      ASSERT_TRUE(std::equal(&out[i * 19], &out[i * 19] + 19, &table[static_cast<std::size_t>(indices[i]) * 19]));
  }
}

TEST(HostRows, ComeWithinHalfAStepInEightBits) {
  std::vector<float> table = random_values(37 * 19, 3);
  std::fill_n(table.begin(), 19, 0.0F);
  table[19 + 4] = 3e38F;
  table[2 * 19] = -1e-42F;  // below the smallest normal number
  const std::vector<std::int64_t> indices = random_rows(200, 4);
  for (const std::int64_t block : {1, 7, 19, 64}) {
    ThreadPool pool(2);
    const std::int64_t blocks = blocks_of_row(19, block);
    std::vector<std::int8_t> values(200 * 19);
    std::vector<float> scales(static_cast<std::size_t>(200 * blocks));
    gather_rows_in_8_bits(table.data(), kShape, indices, block, values.data(), scales.data(), pool);
    for (std::size_t i = 0; i < indices.size(); ++i) {
      for (std::size_t j = 0; j < 19; ++j) {
        const double exact = static_cast<double>(table[static_cast<std::size_t>(indices[i]) * 19 + j]);
        const double scale =
            static_cast<double>(scales[i * static_cast<std::size_t>(blocks) + j / static_cast<std::size_t>(block)]);
        const double got = static_cast<double>(values[i * 19 + j]) * scale;
        ASSERT_LE(std::abs(got - exact), scale * 0.5000001 + 1e-44) << "block " << block << ", value " << exact;
      }
    }
  }
}

TEST(HostRows, GradientsOfARowAreAddedInTheOrderOfTheirPositions) {
  const std::vector<std::int64_t> indices = random_rows(300, 5);
  const std::vector<float> grads = random_values(300 * 19, 6);
  std::map<std::int64_t, std::vector<float>> expected;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    std::vector<float>& sum = expected.try_emplace(indices[i], std::vector<float>(19)).first->second;
    for (std::size_t j = 0; j < 19; ++j) sum[j] += grads[i * 19 + j];
  }
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    const TouchedRows touched = sum_touched_rows(indices, grads.data(), 19, 0.5F, pool);
    ASSERT_EQ(touched.rows.size(), expected.size());
    std::size_t row = 0;
    for (const auto& [index, sum] : expected) {
      EXPECT_EQ(touched.rows[row], index);
      for (std::size_t j = 0; j < 19; ++j) ASSERT_EQ(touched.sums[row * 19 + j], sum[j] * 0.5F) << threads;
      ++row;
    }
  }
}

TEST(HostRows, RulesChangeTouchedRowsAlone) {
  const std::vector<std::int64_t> indices{5, 30, 5};
  const std::vector<float> grads = random_values(3 * 19, 7);
  const std::vector<float> before = random_values(37 * 19, 8);
  ThreadPool pool(2);
  const TouchedRows touched = sum_touched_rows(indices, grads.data(), 19, 1.0F, pool);
  const auto expect_only = [&](const std::vector<float>& after) {
    for (std::size_t i = 0; i < after.size(); ++i)
      ASSERT_EQ(after[i] != before[i], i / 19 == 5 || i / 19 == 30) << "value " << i;
  };
  std::vector<float> table = before;
  update_rows_sgd(table.data(), kShape, touched, {.lr = 0.5F}, pool);
  expect_only(table);
  EXPECT_EQ(table[5 * 19], before[5 * 19] - 0.5F * (grads[0] + grads[2 * 19]));
  table = before;
  std::vector<float> sums(37);
  update_rows_adagrad(table.data(), sums.data(), kShape, touched, {}, pool);
  expect_only(table);
  EXPECT_EQ(std::ranges::count_if(sums, [](float sum) { return sum != 0.0F; }), 2);
  table = before;
  std::vector<float> first(37 * 19);
  std::vector<float> second(37 * 19);
  update_rows_adam(table.data(), first.data(), second.data(), kShape, touched, {}, pool);
  expect_only(table);
  EXPECT_NEAR(std::abs(table[30 * 19] - before[30 * 19]), 0.01F, 1e-4F) << "the first step of Adam has length lr";
}

TEST(HostRows, AnIndexThatIsNoRowIsNamedWithItsPosition) {
  for (const std::int64_t bad : {std::int64_t{37}, std::int64_t{-1}}) {
    const std::vector<std::int64_t> indices{3, 36, bad, 99};
    EXPECT_THAT(test::error_of(ErrorCode::kUsage, [&] { require_rows(indices, 37); }),
                AllOf(HasSubstr("position 2 of 4"), HasSubstr("0 to 36"), HasSubstr("got: " + std::to_string(bad))));
  }
  EXPECT_THAT(test::error_of(ErrorCode::kUsage, [] { (void)blocks_of_row(5, 0); }), HasSubstr("blocks of 0"));
}

}  // namespace
}  // namespace zeroth
