#include "sampling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string_view>
#include <vector>

namespace gpt {
namespace {

TEST(SampleIndex, FollowsTheCumulatedProbabilities) {
  const std::vector<double> logits = {std::log(0.2), std::log(0.5), std::log(0.3)};
  EXPECT_EQ(sample_index(logits, 1.0, 0.0), 0U);
  EXPECT_EQ(sample_index(logits, 1.0, 0.199), 0U);
  EXPECT_EQ(sample_index(logits, 1.0, 0.201), 1U);
  EXPECT_EQ(sample_index(logits, 1.0, 0.699), 1U);
  EXPECT_EQ(sample_index(logits, 1.0, 0.701), 2U);
  EXPECT_EQ(sample_index(logits, 1.0, std::nextafter(1.0, 0.0)), 2U);
}

TEST(SampleIndex, SharpensWithLowerTemperature) {
  const std::vector<double> logits = {0.0, std::log(2.0)};  // 1/3, 2/3; at temperature 0.5: 1/5, 4/5
  EXPECT_EQ(sample_index(logits, 1.0, 0.3), 0U);
  EXPECT_EQ(sample_index(logits, 0.5, 0.3), 1U);
  EXPECT_EQ(sample_index(logits, 0.5, 0.19), 0U);
  EXPECT_EQ(sample_index(logits, 0.0, 0.0), 1U);
}

TEST(SampleIndex, SurvivesHugeLogitsAndOneCandidate) {
  const std::vector<double> huge = {1e300, -1e300, 1e300};
  EXPECT_EQ(sample_index(huge, 1.0, 0.9), 2U);
  EXPECT_EQ(sample_index(huge, 0.0, 0.9), 0U);
  const std::vector<double> single = {-5.0};
  EXPECT_EQ(sample_index(single, 0.8, 0.99), 0U);
}

TEST(Printable, EscapesWhatATerminalWouldObey) {
  using std::string_view_literals::operator""sv;
  EXPECT_EQ(printable("a\tb\nc\x1b[0m\xff\0~"sv), "a\tb\nc\\x1b[0m\\xff\\x00~");
}

}  // namespace
}  // namespace gpt
