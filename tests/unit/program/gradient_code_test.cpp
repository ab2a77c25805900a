// Codes of gradients over all sets of survivors, and simulated steps with stragglers.
#include <zeroth/base/error.h>
#include <zeroth/program/gradient_code.h>
#include <zeroth/program/stragglers.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace zeroth {
namespace {

/// Calls each(survivors) for every set of `count` of n workers.
template <class Each>
void for_each_set(int n, int count, const Each& each) {
  for (unsigned set = 0; set < 1U << static_cast<unsigned>(n); ++set) {
    if (std::popcount(set) != count) continue;
    std::vector<int> survivors;
    for (int worker = 0; worker < n; ++worker) {
      if ((set >> static_cast<unsigned>(worker) & 1U) != 0) survivors.push_back(worker);
    }
    each(survivors);
  }
}

/// Gradients of the chunks: whole numbers, so that their sum is exact.
std::vector<std::vector<double>> chunk_gradients(int chunks) {
  std::mt19937_64 random(7);
  std::vector<std::vector<double>> all(static_cast<std::size_t>(chunks), std::vector<double>(5));
  for (auto& gradient : all) {
    for (double& x : gradient) x = static_cast<double>(static_cast<std::int64_t>(random() % 2001) - 1000);
  }
  return all;
}

TEST(GradientCode, GivesTheFullGradientFromAnySurvivors) {
  for (int n = 1; n <= 9; ++n) {
    for (int s = 0; s < n; ++s) {
      const GradientCode code = gradient_code(n, s);
      const auto parts = chunk_gradients(n);
      for (const auto& row : code.rows) ASSERT_EQ(row.size(), static_cast<std::size_t>(s) + 1);
      for_each_set(n, n - s, [&](const std::vector<int>& survivors) {
        const std::vector<double> coefficients = decode_coefficients(code, survivors);
        ASSERT_EQ(coefficients.size(), survivors.size());
        for (std::size_t element = 0; element < 5; ++element) {
          double want = 0.0;
          double sizes = 0.0;
          for (const auto& part : parts) want += part[element];
          double got = 0.0;
          for (std::size_t k = 0; k < survivors.size(); ++k) {
            double sent = 0.0;
            for (const CodedChunk& chunk : code.rows[static_cast<std::size_t>(survivors[k])]) {
              sent += chunk.coefficient * parts[static_cast<std::size_t>(chunk.chunk)][element];
              sizes += std::fabs(coefficients[k] * chunk.coefficient * 1000);
            }
            got += coefficients[k] * sent;
          }
          if (code.is_fractional()) {
            ASSERT_EQ(got, want) << n << " workers, " << s << " stragglers";
          } else {
            ASSERT_NEAR(got, want, 1e-12 * sizes) << n << " workers, " << s << " stragglers";
          }
        }
      });
    }
  }
}

TEST(GradientCode, OfFourWorkersWithOneStragglerIsExactFromAnyThree) {
  const GradientCode code = gradient_code(4, 1);
  const std::vector<CodedChunk> first{{0, 1.0}, {1, 1.0}};
  const std::vector<CodedChunk> second{{2, 1.0}, {3, 1.0}};
  EXPECT_EQ(code.rows, (std::vector<std::vector<CodedChunk>>{first, first, second, second}));
  EXPECT_EQ(decode_coefficients(code, std::vector<int>{1, 2, 3}), (std::vector<double>{1, 1, 0}));
  EXPECT_EQ(decode_coefficients(code, std::vector<int>{3, 0}), (std::vector<double>{1, 1}));
}

TEST(GradientCode, HasEveryWorkersChunksInACircleWhereGroupsDoNotFit) {
  const GradientCode code = gradient_code(5, 2, 3);
  EXPECT_EQ(code, gradient_code(5, 2, 3));
  EXPECT_NE(code, gradient_code(5, 2, 4));
  for (int worker = 0; worker < 5; ++worker) {
    std::vector<int> chunks;
    for (const CodedChunk& chunk : code.rows[static_cast<std::size_t>(worker)]) chunks.push_back(chunk.chunk);
    std::vector<int> want{worker, (worker + 1) % 5, (worker + 2) % 5};
    std::sort(want.begin(), want.end());
    EXPECT_EQ(chunks, want);
  }
  // More survivors than are needed, in any order.
  EXPECT_EQ(decode_coefficients(code, std::vector<int>{4, 1, 0, 2}).back(), 0.0);
}

TEST(GradientCode, ThatCannotBeIsRefused) {
  EXPECT_THROW(static_cast<void>(gradient_code(0, 0)), Error);
  EXPECT_THROW(static_cast<void>(gradient_code(3, 3)), Error);
  EXPECT_THROW(static_cast<void>(gradient_code(3, -1)), Error);
  for (const int n : {4, 5}) {
    const GradientCode code = gradient_code(n, 1);
    EXPECT_THROW(static_cast<void>(decode_coefficients(code, std::vector<int>{0, 1})), Error);
    EXPECT_THROW(static_cast<void>(decode_coefficients(code, std::vector<int>{0, 1, 1, 2})), Error);
    EXPECT_THROW(static_cast<void>(decode_coefficients(code, std::vector<int>{0, 1, 2, n})), Error);
  }
}

constexpr int kSimulated = 4000;

TEST(Stragglers, StepsAreShorterWithACodeAndShorterStillWithASequentialOne) {
  for (const int n : {4, 8, 16}) {
    for (const std::uint64_t seed : {1, 2, 3}) {
      const auto delays = straggler_delays({}, n, kSimulated, seed);
      const double plain = plain_step_time(delays);
      const double coded = coded_step_time(delays, 1);
      const double sequential = sequential_step_time(delays, {.stragglers = 1, .most_missing = 3, .delay = 2});
      EXPECT_LT(coded, plain) << n << " workers, seed " << seed;
      EXPECT_LT(sequential, coded) << n << " workers, seed " << seed;
      RecordProperty("step of " + std::to_string(n) + " workers, seed " + std::to_string(seed),
                     std::to_string(plain) + " plain, " + std::to_string(coded) + " coded, " +
                         std::to_string(sequential) + " sequential");
    }
  }
}

TEST(Stragglers, ASequentialCodeThatWaitsForAllButItsStragglersIsThePlainCode) {
  const auto delays = straggler_delays({}, 8, kSimulated, 5);
  const std::span all(delays);
  EXPECT_EQ(sequential_step_time(all, {.stragglers = 2, .most_missing = 2, .delay = 3}),
            coded_step_time(all.first(kSimulated - 3), 2));
}

TEST(Stragglers, StepsByHand) {
  // Three workers with one straggler: at most two miss, what they owe comes a step later.
  const std::vector<std::vector<double>> delays{{0, 5, 7}, {1, 0, 9}, {0, 0, 0}};
  const double load = 2.0 / 3.0;
  EXPECT_DOUBLE_EQ(plain_step_time(delays), 1.0 / 3.0 + (7 + 9 + 0) / 3.0);
  EXPECT_DOUBLE_EQ(coded_step_time(delays, 1), load + (5 + 1 + 0) / 3.0);
  // Step 0 ends at 0, with worker 0's answer. In step 1 worker 1 does step 0's work and answers at 0; the two others
  // are not waited for. Step 2 does the work of step 1 with workers 0 and 1, at 0.
  EXPECT_DOUBLE_EQ(sequential_step_time(delays, {.stragglers = 1, .most_missing = 2, .delay = 1}),
                   (3 * load + 0 + 0 + 0) / 2.0);
}

TEST(Stragglers, ThatCannotBeAreRefused) {
  const auto delays = straggler_delays({}, 4, 10, 1);
  EXPECT_THROW(static_cast<void>(plain_step_time({})), Error);
  EXPECT_THROW(static_cast<void>(coded_step_time(delays, 4)), Error);
  EXPECT_THROW(static_cast<void>(sequential_step_time(delays, {.stragglers = 2, .most_missing = 1})), Error);
  EXPECT_THROW(static_cast<void>(sequential_step_time(delays, {.most_missing = 4})), Error);
  EXPECT_THROW(static_cast<void>(sequential_step_time(delays, {.delay = 10})), Error);
}

}  // namespace
}  // namespace zeroth
