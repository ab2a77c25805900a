// The stage changes memory, never numbers, also under LibTorch: a transformer and a foreign model on ranks
// that are threads, every plan in both execution modes, compared by bits; and against plain torch, within
// rounding.
#include "parity/torch_parity_list.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <vector>

namespace zeroth::testing {
namespace {

class TorchParity : public ::testing::TestWithParam<int> {
 protected:
  static void expect_parity(TorchNet net, DType dtype) {
    for (const TorchTraining& reference : parity_references(net, dtype, GetParam())) {
      const TorchOutcome expected = train_torch(reference);
      ASSERT_EQ(expected.losses.size(), static_cast<std::size_t>(reference.steps));
      for (const double norm : expected.norms) EXPECT_TRUE(std::isfinite(norm) && norm > 0) << norm;
      for (const TorchTraining& variant : parity_variants(reference)) {
        EXPECT_EQ(difference(expected, train_torch(variant)), "") << variant.text();
      }
    }
  }
};

TEST_P(TorchParity, GptFloat32) {
  expect_parity(TorchNet::kGpt, DType::kFloat32);
}
TEST_P(TorchParity, GptFloat64) {
  expect_parity(TorchNet::kGpt, DType::kFloat64);
}
TEST_P(TorchParity, GptBFloat16) {
  expect_parity(TorchNet::kGpt, DType::kBFloat16);
}
TEST_P(TorchParity, ForeignFloat32) {
  expect_parity(TorchNet::kForeign, DType::kFloat32);
}
TEST_P(TorchParity, ForeignFloat64) {
  expect_parity(TorchNet::kForeign, DType::kFloat64);
}
TEST_P(TorchParity, ForeignBFloat16) {
  expect_parity(TorchNet::kForeign, DType::kBFloat16);
}

TEST_P(TorchParity, TheComparisonSeesOneBitOfTheLearningRate) {
  TorchTraining training;
  training.world = GetParam();
  const TorchOutcome expected = train_torch(training);
  training.lr = std::nextafter(static_cast<float>(training.lr), 1.0F);
  EXPECT_NE(difference(expected, train_torch(training)), "");
}

TEST_P(TorchParity, RunToRunIdentical) {
  TorchTraining training;
  training.world = GetParam();
  training.zero_stage = 3;
  EXPECT_EQ(difference(train_torch(training), train_torch(training)), "");
}

INSTANTIATE_TEST_SUITE_P(World, TorchParity, ::testing::Values(1, 2, 3, 4), ::testing::PrintToStringParamName());

/// Against plain torch in one process, which goes through all ranks' batches: every stage in worlds 1 to 4,
/// by turns inline and in chaos. A missing factor shows in float64 at 1e-12.
void expect_as_plain_torch(TorchTraining training, double tolerance) {
  training.steps = 20;
  training.reports_memory = false;
  double largest = 0;
  for (const int world : {1, 2, 3, 4}) {
    training.world = world;
    const std::vector<double> expected = train_plain_torch(training);
    for (const int stage : {0, 1, 2, 3}) {
      training.zero_stage = stage;
      // In turn: that both give the same bits is the matter of the tests above.
      training.mode = (world + stage) % 2 == 0 ? ExecutionMode::kInline : ExecutionMode::kChaos;
      const TorchOutcome got = train_torch(training);
      ASSERT_EQ(got.losses.size(), expected.size());
      for (std::size_t step = 0; step < expected.size(); ++step) {
        const double relative = std::abs(got.losses[step] - expected[step]) / std::abs(expected[step]);
        EXPECT_LE(relative, tolerance) << training.text() << " step " << step;
        largest = std::max(largest, relative);
      }
    }
  }
  std::cout << "  largest relative difference of a loss: " << largest << "\n";
}

TEST(TorchReference, GptFloat64) {
  for (const double clipping : {0.0, 0.5}) {
    expect_as_plain_torch({.dtype = DType::kFloat64, .micro_steps = 2, .clipping = clipping}, 1e-12);
  }
}

TEST(TorchReference, ForeignFloat64) {
  for (const double clipping : {0.0, 0.5}) {
    expect_as_plain_torch({.net = TorchNet::kForeign, .dtype = DType::kFloat64, .micro_steps = 2, .clipping = clipping},
                          1e-12);
  }
}

TEST(TorchReference, GptFloat32) {
  expect_as_plain_torch({.micro_steps = 2}, 1e-6);
}

TEST(TorchReference, ForeignFloat32) {
  expect_as_plain_torch({.net = TorchNet::kForeign, .micro_steps = 2}, 1e-6);
}

TEST(TorchReference, SgdFloat32) {
  for (const TorchNet net : {TorchNet::kGpt, TorchNet::kForeign}) {
    expect_as_plain_torch({.net = net, .micro_steps = 2, .lr = 3e-2, .sgd = true}, 1e-6);
  }
}

TEST(TorchReference, SgdFloat64) {
  for (const TorchNet net : {TorchNet::kGpt, TorchNet::kForeign}) {
    for (const double clipping : {0.0, 0.5}) {
      expect_as_plain_torch(
          {.net = net, .dtype = DType::kFloat64, .micro_steps = 2, .clipping = clipping, .lr = 3e-2, .sgd = true},
          1e-12);
    }
  }
}

TEST(TorchReference, AWrongFactorWouldShow) {
  TorchTraining training{.dtype = DType::kFloat64, .world = 2, .steps = 20, .clipping = 0.0, .lr = 3e-2, .sgd = true};
  const std::vector<double> expected = train_plain_torch(training);
  training.lr *= 1.0 + 1e-9;
  const TorchOutcome got = train_torch(training);
  EXPECT_GT(std::abs(got.losses.back() - expected.back()) / expected.back(), 1e-12);
}

}  // namespace
}  // namespace zeroth::testing
