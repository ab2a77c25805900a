// plan_memory against a closed formula that this file computes from the ParamSpecs alone.
#include "random_model.h"

#include <zeroth/zero/memory_plan.h>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace zeroth {
namespace {

std::uint64_t pages(std::int64_t elements, std::int64_t bytes) {
  return static_cast<std::uint64_t>((elements * bytes + 4095) / 4096 * 4096);
}

/// One flat buffer, as design and headers describe it.
struct Part {
  int unit;
  std::int64_t element;       // bytes in the dtype that computes
  std::int64_t accumulation;  // bytes of sums and states
  bool trainable;
  std::int64_t length;

  /// Elements that `rank` owns: whole blocks, the odd ones to the ranks from `unit` on.
  [[nodiscard]] std::int64_t shard(int rank, int world) const {
    const std::int64_t blocks = length / 1024;
    const std::int64_t turn = (rank - unit % world + world) % world;
    return (blocks / world + (turn < blocks % world ? 1 : 0)) * 1024;
  }
};

std::vector<Part> parts_of(const testing::RandomModel& model) {
  std::vector<Part> parts;
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    std::map<std::tuple<DType, bool, double>, std::size_t> found;
    for (const int index : model.units[unit].params) {
      const ParamSpec& param = model.params[static_cast<std::size_t>(index)];
      const auto key = std::make_tuple(param.dtype, param.trainable, param.grad_factor);
      const std::int64_t element = param.dtype == DType::kFloat64   ? 8
                                   : param.dtype == DType::kFloat32 ? 4
                                                                    : 2;
      if (!found.contains(key)) {
        found[key] = parts.size();
        parts.push_back(
            {static_cast<int>(unit), element, std::max<std::int64_t>(4, element), param.trainable, 0});
      }
      Part& part = parts[found[key]];
      while (part.length * element % 64 != 0) ++part.length;
      std::int64_t numel = 1;
      for (const std::int64_t extent : param.shape) numel *= extent;
      part.length += numel;
    }
  }
  for (Part& part : parts) part.length = (part.length + 1023) / 1024 * 1024;
  return parts;
}

/// Largest unit of each place in a ring, plus all units outside of it.
std::uint64_t slots(const testing::RandomModel& model,
                    const std::vector<std::uint64_t>& unit_bytes,
                    bool ring,
                    int ring_slots) {
  std::map<int, std::uint64_t> places;
  std::uint64_t single = 0;
  int position = 0;
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    if (!model.units[unit].repeated || !ring) {
      single += unit_bytes[unit];
    }
    if (model.units[unit].repeated) {
      std::uint64_t& place = places[position++ % ring_slots];
      place = std::max(place, unit_bytes[unit]);
    }
  }
  if (ring) {
    for (const auto& [place, bytes] : places) single += bytes;
  }
  return single;
}

MemorySnapshot formula(const testing::RandomModel& model,
                       int stage,
                       const ShardingPlan& plan,
                       int rank,
                       int world,
                       int states,
                       int micro_steps) {
  MemorySnapshot memory;
  const auto at = [&memory](MemoryState state) -> std::uint64_t& {
    return memory.bytes[static_cast<std::size_t>(state)];
  };
  const std::vector<Part> parts = parts_of(model);
  std::vector<std::uint64_t> bucket(model.units.size(), 0);
  std::vector<std::uint64_t> gathered(model.units.size(), 0);
  for (const Part& part : parts) {
    const std::int64_t shard = part.shard(rank, world);
    at(MemoryState::kParameter) += pages(stage == 3 ? shard : part.length, part.element);
    if (stage == 3) gathered[static_cast<std::size_t>(part.unit)] += pages(part.length, part.element);
    if (!part.trainable) continue;
    const std::int64_t updated = stage == 0 ? part.length : shard;
    if (part.element == 2) at(MemoryState::kMaster) += pages(updated, 4);
    at(MemoryState::kOptimizer) += static_cast<std::uint64_t>(states) * pages(updated, part.accumulation);
    at(MemoryState::kReduced) += pages(shard, part.accumulation);
    bucket[static_cast<std::size_t>(part.unit)] += pages(part.length, part.accumulation);
  }
  const bool accumulates = plan.policy == ReductionPolicy::kPerStep && micro_steps > 1;
  at(MemoryState::kBucket) = slots(model, bucket, stage >= 2 && !accumulates, plan.ring_slots);
  at(MemoryState::kGathered) = slots(model, gathered, plan.reshard != Reshard::kNone, plan.ring_slots);
  at(MemoryState::kControl) = memory[MemoryState::kControl];
  return memory;
}

RC_GTEST_PROP(MemoryPlanProperty, EqualsTheFormulaOfTheParameters, ()) {
  const auto random = testing::any_model();
  const auto world = *rc::gen::inRange(1, 8);
  const auto rank = *rc::gen::inRange(0, world);
  const auto states = *rc::gen::inRange(0, 4);
  const auto micro_steps = *rc::gen::inRange(1, 4);
  const ShardingPlan plan = testing::any_plan();
  const int stage = plan.name.back() - '0';
  const ModelLayout model = make_model_layout(random.params, random.units, world);
  MemorySnapshot expected = formula(random, stage, plan, rank, world, states, micro_steps);
  expected.bytes[static_cast<std::size_t>(MemoryState::kControl)] = control_bytes(model);
  const MemorySnapshot planned = plan_memory(model, plan, rank, states, micro_steps);
  for (std::size_t state = 0; state < kNumMemoryStates; ++state) {
    RC_LOG() << name_of(static_cast<MemoryState>(state)) << ": formula " << expected.bytes[state]
             << ", planned " << planned.bytes[state] << "\n";
  }
  RC_ASSERT(planned == expected);
}

RC_GTEST_PROP(MemoryPlanProperty, ShardsOfAllRanksAddUpToOneModel, ()) {
  const auto random = testing::any_model();
  const auto world = *rc::gen::inRange(1, 8);
  const ModelLayout model = make_model_layout(random.params, random.units, world);
  const ModelLayout alone = make_model_layout(random.params, random.units, 1);
  const ShardingPlan plan = zero_plan(3, {"dp"});
  const MemorySnapshot whole = plan_memory(alone, zero_plan(0, {"dp"}), 0, 2, 1);
  MemorySnapshot sum;
  for (int rank = 0; rank < world; ++rank) {
    const MemorySnapshot part = plan_memory(model, plan, rank, 2, 1);
    for (std::size_t state = 0; state < kNumMemoryStates; ++state) sum.bytes[state] += part.bytes[state];
  }
  // Blocks of bf16 are half a page: a shard may round up by that much per flat and rank.
  const std::uint64_t slack = static_cast<std::uint64_t>(world) * model.flats.size() * kPageBytes;
  for (const MemoryState state :
       {MemoryState::kParameter, MemoryState::kMaster, MemoryState::kOptimizer, MemoryState::kReduced}) {
    RC_ASSERT(sum[state] >= whole[state]);
    RC_ASSERT(sum[state] <= whole[state] + slack);
  }
}

RC_GTEST_PROP(MemoryPlanProperty, HigherStagesNeverNeedMoreAtRest, ()) {
  const auto random = testing::any_model();
  const auto world = *rc::gen::inRange(1, 8);
  const ModelLayout model = make_model_layout(random.params, random.units, world);
  const auto at_rest = [&](int stage) {
    const MemorySnapshot memory = plan_memory(model, zero_plan(stage, {"dp"}), world - 1, 2, 1);
    return memory.total() - memory[MemoryState::kGathered];
  };
  for (int stage = 1; stage < 4; ++stage) RC_ASSERT(at_rest(stage) <= at_rest(stage - 1));
}

TEST(MemoryPlan, KnownTableOfOneLinearLayer) {
  // 1,048,576 fp32 parameters on 4 ranks: 4 MiB each state, a quarter where sharded.
  const ModelLayout model =
      make_model_layout({{.name = "w", .shape = {1024, 1024}}}, {{.name = "root", .params = {0}}}, 4);
  const auto mib = [&](int stage, MemoryState state) {
    return static_cast<double>(plan_memory(model, zero_plan(stage, {"dp"}), 2, 2, 1)[state]) / (1 << 20);
  };
  const double parameters[] = {4, 4, 4, 1};
  const double optimizer[] = {8, 2, 2, 2};
  const double gathered[] = {0, 0, 0, 4};
  for (int stage = 0; stage < 4; ++stage) {
    EXPECT_EQ(mib(stage, MemoryState::kParameter), parameters[stage]);
    EXPECT_EQ(mib(stage, MemoryState::kMaster), 0);
    EXPECT_EQ(mib(stage, MemoryState::kOptimizer), optimizer[stage]);
    EXPECT_EQ(mib(stage, MemoryState::kBucket), 4);
    EXPECT_EQ(mib(stage, MemoryState::kReduced), 1);
    EXPECT_EQ(mib(stage, MemoryState::kGathered), gathered[stage]);
  }
}

TEST(MemoryPlan, ControlGrowsWithFlatsAndRanksByWholePages) {
  const ModelLayout none = make_model_layout({}, {}, 1);
  EXPECT_EQ(control_bytes(none), kPageBytes);
  std::vector<ParamSpec> params;
  std::vector<UnitSpec> units;
  for (int unit = 0; unit < 500; ++unit) {
    params.push_back({.name = std::to_string(unit), .shape = {1}});
    units.push_back({.name = std::to_string(unit), .params = {unit}});
  }
  for (const int world : {1, 2, 7}) {
    const std::size_t bytes = control_bytes(make_model_layout(params, units, world));
    EXPECT_EQ(bytes % kPageBytes, 0U);
    EXPECT_GE(bytes, 500U * (3U + static_cast<std::size_t>(world)) * 8U);
    EXPECT_LE(bytes, 500U * (3U + static_cast<std::size_t>(world)) * 8U + 2 * kPageBytes);
  }
}

}  // namespace
}  // namespace zeroth
