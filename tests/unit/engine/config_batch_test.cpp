// train_batch_size = micro batch x accumulation x data ranks.
#include "unit/engine/config_test_support.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kAbsent = -1;

Config with(std::int64_t train, std::int64_t micro, std::int64_t accumulate) {
  Config config;
  if (train != kAbsent) config.train_batch_size = train;
  if (micro != kAbsent) config.train_micro_batch_size_per_gpu = micro;
  if (accumulate != kAbsent) config.gradient_accumulation_steps = accumulate;
  return config;
}

std::string refusal(const Config& config, std::int64_t ranks) {
  try {
    static_cast<void>(config.resolve(ranks));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kConfig);
    return error.what();
  }
  ADD_FAILURE() << "accepted by " << ranks << " ranks: " << config.to_json();
  return {};
}

struct Row {
  std::int64_t train, micro, accumulate, ranks;
  BatchSizes result;
};

TEST(ConfigBatch, TwoSizesGiveTheThird) {
  for (const Row& row : std::vector<Row>{
           {32, 4, kAbsent, 2, {32, 4, 4}},
           {32, kAbsent, 4, 2, {32, 4, 4}},
           {kAbsent, 4, 4, 2, {32, 4, 4}},
           {32, 4, 4, 2, {32, 4, 4}},
           {32, kAbsent, kAbsent, 2, {32, 16, 1}},
           {kAbsent, 4, kAbsent, 2, {8, 4, 1}},
           {kAbsent, 1, 1, 1, {1, 1, 1}},
           {1, kAbsent, kAbsent, 1, {1, 1, 1}},
           {21, 1, kAbsent, 7, {21, 1, 3}},
           {21, kAbsent, 3, 7, {21, 1, 3}},
           {kAbsent, 2147483647, 2147483647, 2, {9223372028264841218, 2147483647, 2147483647}},
       }) {
    EXPECT_EQ(with(row.train, row.micro, row.accumulate).resolve(row.ranks), row.result)
        << row.train << " " << row.micro << " " << row.accumulate << " on " << row.ranks;
  }
}

TEST(ConfigBatch, OffersTheNearestSizesThatWork) {
  EXPECT_THAT(refusal(with(8, kAbsent, kAbsent), 3), HasSubstr("nearest sizes that work are 6 or 9"));
  EXPECT_THAT(refusal(with(100, 4, kAbsent), 8), AllOf(HasSubstr("= 32"), HasSubstr("96 or 128")));
  EXPECT_THAT(refusal(with(100, kAbsent, 3), 7), HasSubstr("84 or 105"));
  // Nothing below one multiple works.
  EXPECT_THAT(refusal(with(2, kAbsent, kAbsent), 3), HasSubstr("nearest sizes that work are 3"));
}

TEST(ConfigBatch, AContradictionNamesEachWayOut) {
  EXPECT_THAT(refusal(with(64, 4, 2), 4),
              AllOf(HasSubstr("micro batch 4 x 2 micro-steps x 4 data ranks = 32"), HasSubstr("train_batch_size 32"),
                    HasSubstr("gradient_accumulation_steps 4"), HasSubstr("train_micro_batch_size_per_gpu 8")));
  // Sizes that would not come out whole are not offered.
  EXPECT_THAT(refusal(with(33, 4, 2), 4),
              AllOf(HasSubstr("train_batch_size 32"), ::testing::Not(HasSubstr("gradient_accumulation_steps 4"))));
}

TEST(ConfigBatch, SomethingMustBeGiven) {
  EXPECT_THAT(refusal(Config{}, 2), HasSubstr("no batch size is given"));
  EXPECT_THAT(refusal(with(kAbsent, kAbsent, 4), 2), HasSubstr("set train_micro_batch_size_per_gpu"));
}

TEST(ConfigBatch, AbsurdSizesAreErrors) {
  EXPECT_THAT(refusal(with(kAbsent, 2147483647, 2147483647), 3), HasSubstr("does not fit 64 bits"));
  EXPECT_THAT(refusal(with(0, 4, kAbsent), 1), HasSubstr("below 1"));
  EXPECT_THAT(refusal(with(8, -4, kAbsent), 1), HasSubstr("below 1"));
  EXPECT_THAT(refusal(with(8, 0, 0), 1), HasSubstr("below 1"));
  EXPECT_THROW(static_cast<void>(with(8, 4, kAbsent).resolve(0)), Error);
}

TEST(ConfigBatch, TheWorldMustBeTheOneThatWasMeant) {
  const Config config = read(R"({"train_micro_batch_size_per_gpu": 2, "data_parallel_size": 4})");
  EXPECT_EQ(config.resolve(4), (BatchSizes{8, 2, 1}));
  EXPECT_THAT(refusal(config, 3), AllOf(HasSubstr("expected: 4 data ranks"), HasSubstr("got: 3")));
}

TEST(ConfigBatch, EveryOfferWorks) {
  for (std::int64_t ranks : {1, 2, 3, 7}) {
    for (std::int64_t micro = 1; micro <= 4; ++micro) {
      for (std::int64_t train = 1; train <= 60; ++train) {
        const Config config = with(train, micro, kAbsent);
        if (train % (micro * ranks) == 0) {
          const BatchSizes sizes = config.resolve(ranks);
          EXPECT_EQ(sizes.micro * sizes.accumulate * ranks, train);
          continue;
        }
        const std::int64_t above = (train / (micro * ranks) + 1) * micro * ranks;
        EXPECT_THAT(refusal(config, ranks), HasSubstr(std::to_string(above)));
        EXPECT_EQ(with(above, micro, kAbsent).resolve(ranks).train, above);
      }
    }
  }
}

}  // namespace
}  // namespace zeroth::test
