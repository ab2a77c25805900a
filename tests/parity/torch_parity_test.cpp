// The stage changes memory, never numbers, also under LibTorch: a transformer and a foreign model on ranks
// that are threads, every plan in both execution modes, compared by bits; and against plain torch, within
// rounding. `make test` runs rows in which any two factors meet; the whole grids are of the long tier.
#include "parity/torch_parity_list.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace zeroth::test {
namespace {

void expect_parity(const ParityGroup& group) {
  const TorchOutcome expected = train_torch(group.reference);
  ASSERT_EQ(expected.losses.size(), static_cast<std::size_t>(group.reference.steps));
  for (const double norm : expected.norms) EXPECT_TRUE(std::isfinite(norm) && norm > 0) << norm;
  for (const TorchTraining& variant : group.variants) {
    EXPECT_EQ(difference(expected, train_torch(variant)), "") << variant.text();
  }
}

TEST(TorchRows, HaveTheBitsOfStageZero) {
  for (const ParityGroup& group : parity_rows({1, 2, 3, 4})) expect_parity(group);
}

class TorchParity : public ::testing::TestWithParam<int> {
 protected:
  static void expect_parity_of_all(TorchNet net, DType dtype) {
    for (const ParityGroup& group : parity_grid(net, dtype, GetParam())) expect_parity(group);
  }
};

TEST_P(TorchParity, GptFloat32) {
  expect_parity_of_all(TorchNet::kGpt, DType::kFloat32);
}
TEST_P(TorchParity, GptFloat64) {
  expect_parity_of_all(TorchNet::kGpt, DType::kFloat64);
}
TEST_P(TorchParity, GptBFloat16) {
  expect_parity_of_all(TorchNet::kGpt, DType::kBFloat16);
}
TEST_P(TorchParity, ForeignFloat32) {
  expect_parity_of_all(TorchNet::kForeign, DType::kFloat32);
}
TEST_P(TorchParity, ForeignFloat64) {
  expect_parity_of_all(TorchNet::kForeign, DType::kFloat64);
}
TEST_P(TorchParity, ForeignBFloat16) {
  expect_parity_of_all(TorchNet::kForeign, DType::kBFloat16);
}

INSTANTIATE_TEST_SUITE_P(Long, TorchParity, ::testing::Values(1, 2, 3, 4), ::testing::PrintToStringParamName());

/// With bits that are changed here: what another kernel of torch makes of another input is that machine's matter.
TEST(TorchComparison, SeesOneBitOfEverythingThatItCompares) {
  TorchTraining training;
  training.net = TorchNet::kForeign;  // it has buffers
  training.world = 2;
  const TorchOutcome expected = train_torch(training);
  ASSERT_EQ(difference(expected, expected), "");
  for (const TorchOutcome& other : one_bit_apart(expected)) EXPECT_NE(difference(expected, other), "");
}

TEST(TorchComparison, RunToRunIdentical) {
  for (const int world : {1, 2, 3, 4}) {
    TorchTraining training;
    training.world = world;
    training.zero_stage = 3;
    EXPECT_EQ(difference(train_torch(training), train_torch(training)), "") << world;
  }
}

/// Against plain torch in one process, which goes through all ranks' batches. A missing factor shows in float64 at
/// 1e-12. Levels: model, numbers (float32, float64, float64 with clipping), optimizer, world, stage, mode.
void expect_as_plain_torch(const FactorRow& row, int steps) {
  TorchTraining training{.net = kParityNets[static_cast<std::size_t>(row[0])],
                         .dtype = row[1] == 0 ? DType::kFloat32 : DType::kFloat64,
                         .world = row[3] + 1,
                         .micro_steps = 2,
                         .steps = steps,
                         .clipping = row[1] == 1 ? 0.0 : 0.5,
                         .zero_stage = row[4],
                         .mode = kParityModes[static_cast<std::size_t>(row[5])],
                         .reports_memory = false};
  training.sgd = row[2] == 1;
  if (training.sgd) training.lr = 3e-2;
  const std::vector<double> expected = train_plain_torch(training);
  const TorchOutcome got = train_torch(training);
  ASSERT_EQ(got.losses.size(), expected.size());
  for (std::size_t step = 0; step < expected.size(); ++step) {
    const double relative = std::abs(got.losses[step] - expected[step]) / std::abs(expected[step]);
    EXPECT_LE(relative, training.dtype == DType::kFloat32 ? 1e-6 : 1e-12) << training.text() << " step " << step;
  }
}

const std::vector<int> kReferenceLevels{2, 3, 2, 4, 4, 2};

TEST(TorchReference, RowsHaveItsLosses) {
  for (const FactorRow& row : covering_array(kReferenceLevels, 2)) expect_as_plain_torch(row, 8);
}

TEST(LongTorchReference, EverythingHasItsLosses) {
  for (const FactorRow& row : whole_grid(kReferenceLevels)) expect_as_plain_torch(row, 20);
}

TEST(TorchReference, AWrongFactorWouldShow) {
  TorchTraining training{.dtype = DType::kFloat64, .world = 2, .steps = 20, .clipping = 0.0, .lr = 3e-2, .sgd = true};
  const std::vector<double> expected = train_plain_torch(training);
  training.lr *= 1.0 + 1e-9;
  const TorchOutcome got = train_torch(training);
  EXPECT_GT(std::abs(got.losses.back() - expected.back()) / expected.back(), 1e-12);
}

}  // namespace
}  // namespace zeroth::test
