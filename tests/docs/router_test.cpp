// The file of docs/how-to-add-a-router.md (blocks.py), and what the page says of it.
#include "docs/how-to-add-a-router-1.cpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace zeroth {
namespace {

TEST(HowToAddARouter, TokensHaveAsManyExpertsAsTheyNeed) {
  libtorch::GateOptions options;
  options.router.choices = 3;
  options.drop_tokens = false;
  options.rule = libtorch::top_p(0.6);
  libtorch::Gate gate(4, options);
  // Scores of three tokens: one expert has enough, two have, three have less than 0.6 only with the third.
  const torch::Tensor scores =
      torch::tensor({{.7, .1, .1, .1}, {.1, .2, .5, .2}, {.25, .25, .25, .25}}, torch::kFloat64);
  const libtorch::Gated gated = gate.forward({.x = scores.log(), .weight = torch::eye(4, torch::kFloat64)});
  const torch::Tensor expected = torch::tensor({{0, -1, -1}, {2, 1, -1}, {0, 1, 2}}, torch::kLong);
  EXPECT_TRUE(torch::equal(gated.experts, expected)) << gated.experts;
  const torch::Tensor weights =
      torch::tensor({{1.0, 0.0, 0.0}, {5.0 / 7, 2.0 / 7, 0.0}, {1.0 / 3, 1.0 / 3, 1.0 / 3}}, torch::kFloat64);
  EXPECT_LT((gated.weights - weights).abs().max().item<double>(), 1e-12) << gated.weights;
  EXPECT_EQ(gated.counts.sum().item<std::int64_t>(), 6);
}

}  // namespace
}  // namespace zeroth
