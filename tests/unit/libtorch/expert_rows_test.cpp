// Rows of tokens go to the slots of experts and back as loops in double say; with their gradients.
#include "libtorch/experts/rows.h"
#include "libtorch/experts/torch_threads.h"
#include "support/error_of.h"

#include <zeroth/libtorch/experts.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using torch::Tensor;

Tensor rows_drawn(std::vector<std::int64_t> shape, std::uint64_t seed, torch::ScalarType dtype = torch::kFloat64) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn(shape, generator, torch::kFloat64).to(dtype);
}

/// [tokens, choices]: experts 0 to 4, and -1 for one of six choices.
Tensor drawn_choices(std::int64_t tokens, std::int64_t choices, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randint(-1, 5, {tokens, choices}, generator, torch::kLong);
}

/// A sort by (expert, token, choice), of entries with an expert.
std::vector<std::int64_t> sorted_entries(const Tensor& experts) {
  const auto* const expert = experts.data_ptr<std::int64_t>();
  std::vector<std::int64_t> entries;
  for (std::int64_t entry = 0; entry < experts.numel(); ++entry) {
    if (expert[entry] >= 0) entries.push_back(entry);
  }
  std::ranges::stable_sort(entries, {}, [&](std::int64_t entry) { return expert[entry]; });
  return entries;
}

double apart(const Tensor& got, const Tensor& expected) {
  EXPECT_EQ(got.sizes(), expected.sizes());
  if (got.sizes() != expected.sizes()) return HUGE_VAL;
  return got.numel() == 0 ? 0 : (got.to(torch::kFloat64) - expected.to(torch::kFloat64)).abs().max().item<double>();
}

/// Runs a case on one of torch's threads and on three.
template <class Case>
void on_threads(const Case& one) {
  const int before = at::get_num_threads();
  for (const int threads : {1, 3}) {
    at::set_num_threads(threads);
    SCOPED_TRACE(std::to_string(threads) + " threads");
    one();
  }
  at::set_num_threads(before);
}

TEST(ExpertRows, PartsMakeUpTheWholeOnTorchsThreads) {
  on_threads([] {
    for (const std::int64_t count : {0, 1, 5, 1000, 100'003}) {
      std::vector<std::atomic<int>> times(static_cast<std::size_t>(count));
      std::atomic<int> parts{0};
      libtorch::for_parts(count, 1000, [&](std::int64_t begin, std::int64_t end) {
        ++parts;
        for (std::int64_t i = begin; i < end; ++i) ++times[static_cast<std::size_t>(i)];
      });
      EXPECT_TRUE(std::ranges::all_of(times, [](const auto& n) { return n == 1; })) << count;
      EXPECT_EQ(parts, count == 0 ? 0 : (count > 1000 ? at::get_num_threads() : 1)) << count;
    }
    EXPECT_THROW(libtorch::for_parts(5000, 10, [](std::int64_t, std::int64_t) { throw std::runtime_error("part"); }),
                 std::runtime_error);
  });
}

TEST(ExpertRows, SlotsAreAStableSortByExpert) {
  for (const std::int64_t choices : {1, 2, 70}) {
    const Tensor experts = drawn_choices(13, choices, 5);
    const libtorch::ChoiceSlots slots = libtorch::slots_of_choices(experts, 6, "");
    const std::vector<std::int64_t> entries = sorted_entries(experts);
    ASSERT_EQ(slots.source_of.size(0), static_cast<std::int64_t>(entries.size()));
    Tensor slot_of = torch::full({13 * choices}, -1, torch::kInt);
    for (std::size_t slot = 0; slot < entries.size(); ++slot) {
      EXPECT_EQ(slots.source_of.data_ptr<std::int32_t>()[slot], entries[slot]);
      slot_of.data_ptr<std::int32_t>()[entries[slot]] = static_cast<std::int32_t>(slot);
    }
    EXPECT_TRUE(torch::equal(slots.slot_of, slot_of.view({13, choices})));
    for (std::int64_t expert = 0; expert < 6; ++expert)
      EXPECT_EQ(slots.counts[static_cast<std::size_t>(expert)], experts.eq(expert).sum().item<std::int64_t>());
  }
}

/// Values and gradients of take_rows() and sum_rows() against loops over elements in double.
void try_rows(std::int64_t tokens, std::int64_t choices, std::int64_t width, torch::ScalarType dtype,
              torch::ScalarType of_weights, double tolerance) {
  SCOPED_TRACE(std::to_string(tokens) + " x " + std::to_string(choices) + " x " + std::to_string(width) + " " +
               torch::toString(dtype));
  const Tensor experts = drawn_choices(tokens, choices, 7);
  const libtorch::ChoiceSlots slots = libtorch::slots_of_choices(experts, 5, "");
  const std::int64_t count = slots.source_of.size(0);
  const Tensor x = rows_drawn({tokens, width}, 1, dtype).requires_grad_();
  const Tensor y = rows_drawn({count, width}, 2, dtype).requires_grad_();
  const Tensor weights = rows_drawn({tokens, choices}, 3, of_weights).requires_grad_();
  const Tensor d_taken = rows_drawn({count, width}, 4, dtype);
  const Tensor d_summed = rows_drawn({tokens, width}, 5, dtype);
  const Tensor taken = libtorch::take_rows(x, slots.source_of, slots.slot_of);
  const Tensor summed = libtorch::sum_rows(y, weights, slots.slot_of, slots.source_of);
  ASSERT_EQ(taken.scalar_type(), dtype);
  ASSERT_EQ(summed.scalar_type(), dtype);
  const auto of_taken = torch::autograd::grad({taken}, {x}, {d_taken});
  const auto of_summed = torch::autograd::grad({summed}, {y, weights}, {d_summed});
  ASSERT_EQ(of_summed[1].scalar_type(), of_weights);

  const auto wide = [](const Tensor& tensor) { return tensor.detach().to(torch::kFloat64).contiguous(); };
  const Tensor xs = wide(x), ys = wide(y), ws = wide(weights), gs = wide(d_taken), hs = wide(d_summed);
  Tensor want_taken = torch::zeros_like(ys), want_summed = torch::zeros_like(xs), want_x = torch::zeros_like(xs);
  Tensor want_y = torch::zeros_like(ys), want_weights = torch::zeros_like(ws);
  const std::vector<std::int64_t> entries = sorted_entries(experts);
  for (std::int64_t slot = 0; slot < count; ++slot) {
    const std::int64_t entry = entries[static_cast<std::size_t>(slot)];
    const std::int64_t token = entry / choices;
    const double weight = ws.data_ptr<double>()[entry];
    for (std::int64_t c = 0; c < width; ++c) {
      const auto at = [&](const Tensor& tensor, std::int64_t row) -> double& {
        return tensor.data_ptr<double>()[row * width + c];
      };
      at(want_taken, slot) = at(xs, token);
      at(want_x, token) += at(gs, slot);
      at(want_summed, token) += weight * at(ys, slot);
      at(want_y, slot) = weight * at(hs, token);
      want_weights.data_ptr<double>()[entry] += at(hs, token) * at(ys, slot);
    }
  }
  EXPECT_EQ(apart(taken, want_taken), 0.0);
  EXPECT_LE(apart(of_taken[0], want_x), tolerance);
  EXPECT_LE(apart(summed, want_summed), tolerance);
  EXPECT_LE(apart(of_summed[0], want_y), tolerance);
  EXPECT_LE(apart(of_summed[1], want_weights), 4 * tolerance * std::sqrt(static_cast<double>(width)));
}

TEST(ExpertRows, ValuesAndGradientsAreThoseOfLoops) {
  on_threads([] {
    struct Shape {
      std::int64_t tokens, choices, width;
    };
    for (const auto& [tokens, choices, width] :
         std::vector<Shape>{{7, 2, 5}, {1, 1, 1}, {0, 2, 4}, {9, 3, 0}, {211, 4, 129}}) {
      try_rows(tokens, choices, width, torch::kFloat64, torch::kFloat64, 1e-14);
      try_rows(tokens, choices, width, torch::kFloat32, torch::kFloat32, 4e-6);
      try_rows(tokens, choices, width, torch::kFloat32, torch::kFloat64, 4e-6);
      try_rows(tokens, choices, width, torch::kBFloat16, torch::kFloat32, 0.04);  // of sums up to 8: half a unit
      try_rows(tokens, choices, width, torch::kHalf, torch::kHalf, 0.006);
    }
    try_rows(3, 70, 6, torch::kFloat64, torch::kFloat64, 1e-13);  // more choices than the kernels take
  });
}

TEST(ExpertRows, AReorderAndItsReverseAreOne) {
  const Tensor x = rows_drawn({50, 33}, 1).requires_grad_();
  const Tensor source = torch::randperm(50, torch::kInt);
  const Tensor back = source.argsort().to(torch::kInt);
  const Tensor there = libtorch::reorder_rows(x, source, back);
  EXPECT_TRUE(torch::equal(there, x.index_select(0, source)));
  EXPECT_TRUE(torch::equal(libtorch::reorder_rows(there, back, source), x));
  const Tensor target = rows_drawn({50, 33}, 2);
  EXPECT_TRUE(torch::equal(torch::autograd::grad({there}, {x}, {target})[0], target.index_select(0, back)));
}

TEST(ExpertRows, RowsNeedNotLieTogether) {
  const Tensor experts = drawn_choices(12, 2, 3);
  const libtorch::ChoiceSlots slots = libtorch::slots_of_choices(experts, 5, "");
  const Tensor x = rows_drawn({6, 12}, 1).t();
  EXPECT_TRUE(torch::equal(libtorch::take_rows(x, slots.source_of, slots.slot_of),
                           libtorch::take_rows(x.contiguous(), slots.source_of, slots.slot_of)));
  const Tensor weights = rows_drawn({2, 12}, 2).t().requires_grad_();
  const Tensor y = rows_drawn({4, slots.source_of.size(0)}, 4).t().requires_grad_();
  const Tensor out = libtorch::sum_rows(y, weights, slots.slot_of, slots.source_of);
  EXPECT_TRUE(
      torch::equal(out, libtorch::sum_rows(y.contiguous(), weights.contiguous(), slots.slot_of, slots.source_of)));
  const auto got = torch::autograd::grad({out.sum()}, {y, weights});  // an expanded gradient
  EXPECT_LE(apart(got[0], weights.flatten().index_select(0, slots.source_of).unsqueeze(1).expand({-1, 4})), 1e-15);
}

TEST(ExpertRows, GradientsOfGradientsAreThoseOfTheOperators) {
  const Tensor experts = drawn_choices(7, 2, 3);
  const libtorch::ChoiceSlots slots = libtorch::slots_of_choices(experts, 5, "");
  const auto second = [&](bool kernels) {
    const Tensor x = rows_drawn({7, 3}, 1).requires_grad_();
    const Tensor weights = rows_drawn({7, 2}, 2).requires_grad_();
    const Tensor entries = slots.source_of.to(torch::kLong);
    const Tensor tokens = torch::floor_divide(entries, 2);
    const Tensor rows = kernels ? libtorch::take_rows(x, slots.source_of, slots.slot_of) : x.index_select(0, tokens);
    const Tensor y = rows.square();
    const Tensor out = kernels ? libtorch::sum_rows(y, weights, slots.slot_of, slots.source_of)
                               : torch::zeros({7, 3}, torch::kFloat64)
                                     .index_add(0, tokens, y * weights.flatten().index_select(0, entries).unsqueeze(1));
    const auto first = torch::autograd::grad({out.pow(3).sum()}, {x, weights}, {}, true, /*create_graph=*/true);
    return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()}, {x, weights});
  };
  const auto got = second(true);
  const auto wanted = second(false);
  for (std::size_t at = 0; at < 2; ++at)
    EXPECT_LE(apart(got[at], wanted[at]), 1e-10 * wanted[at].abs().max().item<double>());
}

/// A token's sum is in the order of its choices: other tokens, and where its rows lie, change no bit of it.
TEST(ExpertRows, ATokensSumDoesNotDependOnOtherTokens) {
  const Tensor experts = drawn_choices(40, 4, 9);
  const Tensor weights = rows_drawn({40, 4}, 1, torch::kFloat32);
  const Tensor of_experts = rows_drawn({5, 40, 17}, 2, torch::kFloat32);  // what each expert says of each token
  const auto summed = [&](std::int64_t first, std::int64_t count) {
    const Tensor chosen = experts.narrow(0, first, count).contiguous();
    const libtorch::ChoiceSlots slots = libtorch::slots_of_choices(chosen, 5, "");
    const Tensor entries = slots.source_of.to(torch::kLong);
    const Tensor y =
        of_experts.index({chosen.flatten().index_select(0, entries), torch::floor_divide(entries, 4) + first});
    return libtorch::sum_rows(y, weights.narrow(0, first, count), slots.slot_of, slots.source_of);
  };
  const Tensor whole = summed(0, 40);
  for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{0, 13}, {13, 1}, {14, 26}})
    EXPECT_TRUE(torch::equal(summed(first, count), whole.narrow(0, first, count)));
}

TEST(ExpertRows, OnlyWhatBackwardNeedsIsSaved) {
  const Tensor experts = torch::zeros({8, 1}, torch::kLong);
  const libtorch::ChoiceSlots slots = libtorch::slots_of_choices(experts, 1, "");
  const Tensor rows = rows_drawn({8, 3}, 1).requires_grad_() * 2;
  const Tensor weights = rows_drawn({8, 1}, 2);
  const auto before = rows.use_count();
  const Tensor plain = libtorch::sum_rows(rows, weights, slots.slot_of, slots.source_of);
  EXPECT_EQ(rows.use_count(), before) << "weights without a gradient need no rows";
  const Tensor taken = libtorch::take_rows(rows, slots.source_of, slots.slot_of);
  EXPECT_EQ(rows.use_count(), before);
  const Tensor scaled = libtorch::sum_rows(rows, weights.requires_grad_(), slots.slot_of, slots.source_of);
  EXPECT_EQ(rows.use_count(), before + 1);
}

}  // namespace
}  // namespace zeroth::test
