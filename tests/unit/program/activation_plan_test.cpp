// The planner of activations equals brute force on small cases, and says why.
#include "support/error_of.h"

#include <zeroth/base/error.h>
#include <zeroth/program/activation_plan.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

namespace zeroth {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// The least step time of all 4^n choices that fit; infinite if none does.
double brute_force(const std::vector<ActivationUnit>& units, const ActivationTier& tier, std::uint64_t cap) {
  double least = std::numeric_limits<double>::infinity();
  std::size_t count = 1;
  for (std::size_t unit = 0; unit < units.size(); ++unit) count *= 4;
  for (std::size_t code = 0; code < count; ++code) {
    std::uint64_t resident = 0;
    double moved = 0.0, forward = 0.0, backward = 0.0;
    std::size_t rest = code;
    for (const ActivationUnit& unit : units) {
      const std::size_t choice = rest % 4;
      rest /= 4;
      forward += unit.forward_s;
      backward += unit.backward_s + (choice % 2 == 1 ? unit.recompute_s : 0.0);
      const std::uint64_t bytes = choice % 2 == 1 ? unit.input_bytes : unit.saved_bytes;
      if (choice < 2) {
        resident += bytes;
      } else {
        moved += static_cast<double>(bytes);
      }
    }
    const double write = moved > 0.0 ? moved / tier.write_bytes_per_s : 0.0;
    const double read = moved > 0.0 ? moved / tier.read_bytes_per_s : 0.0;
    if (resident <= cap) least = std::min(least, std::max(forward, write) + std::max(backward, read));
  }
  return least;
}

/// `alike`: all units are one.
std::vector<ActivationUnit> random_units(std::mt19937& random, bool alike) {
  const auto draw = [&random](unsigned bound) { return static_cast<unsigned>(random()) % bound; };
  std::vector<ActivationUnit> units;
  const unsigned count = 1 + draw(6);
  for (unsigned unit = 0; unit < count; ++unit) {
    units.push_back({.name = "block " + std::to_string(unit),
                     .saved_bytes = 1 + draw(1000),
                     .input_bytes = draw(200),
                     .forward_s = 0.25 * (1 + draw(40)),
                     .backward_s = 0.25 * (1 + draw(80)),
                     .recompute_s = 0.25 * draw(40)});
    if (alike) {
      units.back() = units.front();
    }
  }
  return units;
}

TEST(ActivationPlan, EqualsBruteForce) {
  std::mt19937 random(17);
  int bounded = 0;
  int impossible = 0;
  for (int turn = 0; turn < 400; ++turn) {
    const std::vector<ActivationUnit> units = random_units(random, turn % 4 == 0);
    ActivationTier tier{.write_bytes_per_s = 1.0 + static_cast<unsigned>(random()) % 200,
                        .read_bytes_per_s = 1.0 + static_cast<unsigned>(random()) % 200};
    if (turn % 7 == 0) tier = {};
    std::uint64_t all = 0;
    for (const ActivationUnit& unit : units) all += unit.saved_bytes;
    const std::uint64_t cap = random() % (all + 1);
    const double least = brute_force(units, tier, cap);
    if (least == std::numeric_limits<double>::infinity()) {
      ++impossible;
      test::error_of(ErrorCode::kOutOfMemory, [&] { (void)plan_activations(units, tier, cap); });
      continue;
    }
    const ActivationPlan plan = plan_activations(units, tier, cap);
    EXPECT_TRUE(plan.exact);
    EXPECT_LE(plan.cost.resident_bytes, cap);
    EXPECT_DOUBLE_EQ(plan.cost.step_s(), least) << "case " << turn << "\n" << to_text(plan, units, cap);
    EXPECT_DOUBLE_EQ(activation_cost(units, tier, plan.choices).step_s(), least);
    bounded +=
        plan.cost.step_s() > activation_cost(units, tier, std::vector(units.size(), ActivationChoice::kKeep)).step_s();
  }
  EXPECT_GT(bounded, 50) << "in these the cap costs time";
  EXPECT_GT(impossible, 5);
}

TEST(ActivationPlan, PrefersWhatIsFree) {
  const std::vector<ActivationUnit> units(8, {.name = "block",
                                              .saved_bytes = 100,
                                              .input_bytes = 10,
                                              .forward_s = 1.0,
                                              .backward_s = 2.0,
                                              .recompute_s = 1.0});
  const auto count = [](const ActivationPlan& plan, ActivationChoice choice) {
    return std::ranges::count(plan.choices, choice);
  };
  const ActivationPlan all = plan_activations(units, {.write_bytes_per_s = 1e3, .read_bytes_per_s = 1e3}, 800);
  EXPECT_EQ(count(all, ActivationChoice::kKeep), 8) << "nothing moves that fits";
  const ActivationPlan fast = plan_activations(units, {.write_bytes_per_s = 1e3, .read_bytes_per_s = 1e3}, 300);
  EXPECT_EQ(count(fast, ActivationChoice::kKeep), 3);
  EXPECT_EQ(count(fast, ActivationChoice::kMove), 5) << "transfers hide behind the computation";
  EXPECT_DOUBLE_EQ(fast.cost.step_s(), 24.0);
  const ActivationPlan none = plan_activations(units, {}, 300);
  EXPECT_EQ(count(none, ActivationChoice::kRecompute), 6);
  EXPECT_DOUBLE_EQ(none.cost.step_s(), 30.0);
  const ActivationPlan slow = plan_activations(units, {.write_bytes_per_s = 5.0, .read_bytes_per_s = 5.0}, 0);
  EXPECT_EQ(count(slow, ActivationChoice::kRecomputeAndMove), 8) << "inputs alone pass the tier in time";
}

TEST(ActivationPlan, SaysWhy) {
  const std::vector<ActivationUnit> units{{.name = "blocks.0",
                                           .saved_bytes = 2048,
                                           .input_bytes = 1024,
                                           .forward_s = 0.001,
                                           .backward_s = 0.002,
                                           .recompute_s = 0.001}};
  const ActivationPlan plan = plan_activations(units, {.write_bytes_per_s = 1e6, .read_bytes_per_s = 2e5}, 0);
  EXPECT_THAT(to_text(plan, units, 0), AllOf(HasSubstr("blocks.0"), HasSubstr("recompute+move"),
                                             HasSubstr("bound by the tier"), HasSubstr("memory    0 B of 0 B")));
  EXPECT_THAT(test::error_of(ErrorCode::kOutOfMemory, [&] { (void)plan_activations(units, {}, 1000); }),
              AllOf(HasSubstr("in no way"), HasSubstr("at least 1.00 KiB")));
  std::vector<ActivationUnit> wrong = units;
  wrong[0].forward_s = -1.0;
  EXPECT_THAT(test::error_of(ErrorCode::kUsage, [&] { (void)plan_activations(wrong, {}, 1); }),
              HasSubstr("no seconds"));
}

TEST(ActivationPlan, ManyDifferentUnitsArePlannedInTime) {
  std::mt19937 random(3);
  const auto draw = [&random](unsigned bound) { return static_cast<unsigned>(random()) % bound; };
  std::vector<ActivationUnit> units;
  for (int unit = 0; unit < 20; ++unit) {
    units.push_back({.name = "u",
                     .saved_bytes = 1'000'000 + draw(1'000'000),
                     .input_bytes = 100'000 + draw(100'000),
                     .forward_s = 1e-3 * (1 + draw(1000)),
                     .backward_s = 1e-3 * (1 + draw(2000)),
                     .recompute_s = 1e-3 * (1 + draw(1000))});
  }
  const ActivationTier tier{.write_bytes_per_s = 1e6, .read_bytes_per_s = 1e6};
  const ActivationPlan plan = plan_activations(units, tier, 10'000'000);
  EXPECT_LE(plan.cost.resident_bytes, 10'000'000U);
  const auto of = [&](ActivationChoice choice) {
    return activation_cost(units, tier, std::vector(units.size(), choice)).step_s();
  };
  EXPECT_LE(plan.cost.step_s(), std::min(of(ActivationChoice::kMove), of(ActivationChoice::kRecomputeAndMove)));
}

}  // namespace
}  // namespace zeroth
