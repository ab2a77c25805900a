// plan_memory against a closed formula that this file computes from the ParamSpecs alone.
#include "random_model.h"

#include <zeroth/zero/memory_plan.h>
#include <zeroth/zero/tier_plan.h>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

std::uint64_t product(std::int64_t elements, std::int64_t bytes) {
  return static_cast<std::uint64_t>(elements * bytes);
}

/// One flat buffer, as design and headers describe it.
struct Part {
  int unit;
  std::int64_t element;       // bytes in the dtype that computes
  std::int64_t accumulation;  // bytes of sums and states
  bool trainable;
  std::int64_t length;
  bool stays_wide;  // tied, or vectors of 16 bits

  /// Elements that `rank` owns: blocks, the odd ones to the ranks from `unit` on; the last block may be short.
  [[nodiscard]] std::int64_t shard(int rank, int world) const {
    const std::int64_t blocks = (length + 1023) / 1024;
    std::int64_t before = 0;
    std::int64_t own = 0;
    for (int other = 0; other <= rank; ++other) {
      before += own;
      const std::int64_t turn = (other - unit % world + world) % world;
      own = (blocks / world + (turn < blocks % world ? 1 : 0)) * 1024;
    }
    return std::max<std::int64_t>(0, std::min(before + own, length) - before);
  }
};

std::vector<Part> parts_of(const test::RandomModel& model) {
  std::vector<Part> parts;
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    std::map<std::tuple<DType, bool, bool, double>, std::size_t> found;
    for (const int index : model.units[unit].params) {
      const ParamSpec& param = model.params[static_cast<std::size_t>(index)];
      const bool vectors = param.dtype == DType::kBFloat16 && param.shape.size() <= 1;
      const auto key = std::make_tuple(param.dtype, vectors, param.trainable, param.grad_factor);
      const std::int64_t element = param.dtype == DType::kFloat64 ? 8 : param.dtype == DType::kFloat32 ? 4 : 2;
      if (!found.contains(key)) {
        found[key] = parts.size();
        parts.push_back(
            {static_cast<int>(unit), element, std::max<std::int64_t>(4, element), param.trainable, 0, false});
      }
      Part& part = parts[found[key]];
      part.stays_wide = part.stays_wide || vectors || !param.aliases.empty();
      while (part.length * element % 64 != 0) ++part.length;
      std::int64_t numel = 1;
      for (const std::int64_t extent : param.shape) numel *= extent;
      part.length += numel;
    }
  }
  for (Part& part : parts) {
    while (part.length * part.element % 64 != 0) ++part.length;
  }
  return parts;
}

/// Largest unit of each place in a ring, plus all units outside of it.
std::uint64_t slots(const test::RandomModel& model, const std::vector<std::uint64_t>& unit_bytes, bool ring,
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

MemorySnapshot formula(const test::RandomModel& model, int stage, const ShardingPlan& plan, int rank, int world,
                       int states, int micro_steps) {
  MemorySnapshot memory;
  const auto at = [&memory](MemoryState state) -> std::uint64_t& {
    return memory.bytes[static_cast<std::size_t>(state)];
  };
  const std::vector<Part> parts = parts_of(model);
  std::vector<std::uint64_t> bucket(model.units.size(), 0);
  std::vector<std::uint64_t> gathered(model.units.size(), 0);
  const bool per_step = plan.policy == ReductionPolicy::kPerStep;
  // Gradients travel as they are computed, but where sums are gathered, or formed, in the bucket.
  const auto narrow = [&](const Part& part) {
    const bool repeated = model.units[static_cast<std::size_t>(part.unit)].repeated;
    return part.element == 2 && world > 1 && stage > 0 && repeated && !(per_step && micro_steps > 1) &&
           !part.stays_wide;
  };
  for (const Part& part : parts) {
    const std::int64_t shard = part.shard(rank, world);
    at(MemoryState::kParameter) += product(stage == 3 ? shard : part.length, part.element);
    if (stage == 3) gathered[static_cast<std::size_t>(part.unit)] += product(part.length, part.element);
    if (!part.trainable) continue;
    const std::int64_t updated = stage == 0 ? part.length : shard;
    if (part.element == 2) at(MemoryState::kMaster) += product(updated, 2);
    at(MemoryState::kOptimizer) += static_cast<std::uint64_t>(states) * product(updated, part.accumulation);
    bucket[static_cast<std::size_t>(part.unit)] += product(part.length, narrow(part) ? 2 : part.accumulation);
  }
  const bool all_held = stage <= 1 || (per_step && micro_steps > 1);
  const std::uint64_t all = slots(model, bucket, false, 1);
  const std::uint64_t ring = slots(model, bucket, true, plan.ring_slots);
  const bool once = micro_steps == 1 || per_step;
  const auto ranks = static_cast<std::uint64_t>(world);
  // Units with a bucket that nothing comes into after their own: all outside the ring, and in it the first of each
  // place.
  std::vector<bool> last(model.units.size(), true);
  std::uint64_t beside = 0;
  std::map<int, bool> placed;
  int position = 0;
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    if (model.units[unit].repeated) {
      const int place = position++ % plan.ring_slots;
      if (bucket[unit] > 0) last[unit] = !std::exchange(placed[place], true);
    }
  }
  for (const Part& part : parts) {
    const bool beside_it = part.trainable && !narrow(part) && !last[static_cast<std::size_t>(part.unit)];
    if (beside_it) beside += product(part.length, part.accumulation);
  }
  // Buckets for all, where there are such anyway or where these are no more than a ring and shards, on all ranks.
  const bool all_in_buckets = once && (all_held || ranks * all <= ranks * ring + beside);
  at(MemoryState::kBucket) = all_held || all_in_buckets ? all : ring;
  for (const Part& part : parts) {
    const bool in_bucket = !narrow(part) && (all_in_buckets || (once && last[static_cast<std::size_t>(part.unit)]));
    if (part.trainable && !in_bucket) at(MemoryState::kReduced) += product(part.shard(rank, world), part.accumulation);
  }
  const int at_once = std::min(plan.ring_slots, 1 + plan.prefetch_units);
  at(MemoryState::kGathered) = slots(model, gathered, plan.reshard != Reshard::kNone, at_once);
  at(MemoryState::kControl) = memory[MemoryState::kControl];
  return memory;
}

RC_GTEST_PROP(MemoryPlanProperty, EqualsTheFormulaOfTheParameters, ()) {
  const auto random = test::any_model();
  const auto world = *rc::gen::inRange(1, 8);
  const auto rank = *rc::gen::inRange(0, world);
  const auto states = *rc::gen::inRange(0, 4);
  const auto micro_steps = *rc::gen::inRange(1, 4);
  const ShardingPlan plan = test::any_plan();
  const int stage = plan.name.back() - '0';
  const ModelLayout model = make_model_layout(random.params, random.units, world);
  MemorySnapshot expected = formula(random, stage, plan, rank, world, states, micro_steps);
  expected.bytes[static_cast<std::size_t>(MemoryState::kControl)] = control_bytes(model);
  const MemorySnapshot planned = plan_memory(model, plan, rank, states, micro_steps);
  for (std::size_t state = 0; state < kNumMemoryStates; ++state) {
    RC_LOG() << name_of(static_cast<MemoryState>(state)) << ": formula " << expected.bytes[state] << ", planned "
             << planned.bytes[state] << "\n";
  }
  RC_ASSERT(planned == expected);
}

RC_GTEST_PROP(MemoryPlanProperty, ShardsOfAllRanksAddUpToOneModel, ()) {
  const auto random = test::any_model();
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
  for (const MemoryState state : {MemoryState::kParameter, MemoryState::kMaster, MemoryState::kOptimizer}) {
    RC_ASSERT(sum[state] == whole[state]);
  }
}

RC_GTEST_PROP(MemoryPlanProperty, HigherStagesNeverNeedMoreButForWhatIsGathered, ()) {
  const auto random = test::any_model();
  const auto world = *rc::gen::inRange(1, 8);
  const ModelLayout model = make_model_layout(random.params, random.units, world);
  const auto micro_steps = *rc::gen::inRange(1, 3);
  const auto of_all_ranks = [&](int stage) {
    std::uint64_t sum = 0;
    for (int rank = 0; rank < world; ++rank) {
      const MemorySnapshot memory = plan_memory(model, zero_plan(stage, {"dp"}), rank, 2, micro_steps);
      sum += memory.total() - memory[MemoryState::kGathered];
    }
    return sum;
  };
  for (int stage = 1; stage < 4; ++stage) RC_ASSERT(of_all_ranks(stage) <= of_all_ranks(stage - 1));
}

TEST(MemoryPlan, StatesOfOneLinearLayerAreDividedByTheirDegrees) {
  // 1,048,576 parameters on 8 ranks, AdamW. float32: 4 MiB a state. bfloat16: 2 MiB of parameters, 2 MiB of
  // lower halves of masters.
  constexpr std::uint64_t kMiB = 1U << 20U;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const auto& [parameter, optimizer] :
         {std::pair{1, 1}, {1, 2}, {2, 2}, {2, 4}, {4, 4}, {2, 8}, {4, 8}, {1, 8}, {8, 8}}) {
      ShardingPlan plan = zero_plan(3, {"dp"});
      plan.parameter_degree = parameter;
      plan.optimizer_degree = optimizer;
      const ModelLayout model = make_model_layout({{.name = "w", .shape = {1024, 1024}, .dtype = dtype}},
                                                  {{.name = "root", .params = {0}}}, plan.degrees(8));
      const std::uint64_t element = size_of(dtype);
      const auto w = static_cast<std::uint64_t>(parameter);
      const auto o = static_cast<std::uint64_t>(optimizer);
      for (const int micro_steps : {1, 2}) {
        for (const int rank : {0, 5}) {
          const MemorySnapshot memory = plan_memory(model, plan, rank, 2, micro_steps);
          EXPECT_EQ(memory[MemoryState::kParameter], element * kMiB / w) << parameter << " " << optimizer;
          EXPECT_EQ(memory[MemoryState::kMaster], (4 - element) * kMiB / o) << parameter << " " << optimizer;
          EXPECT_EQ(memory[MemoryState::kOptimizer], 8 * kMiB / o) << parameter << " " << optimizer;
          EXPECT_EQ(memory[MemoryState::kBucket], 4 * kMiB);
          // In the bucket, where it is not needed again.
          EXPECT_EQ(memory[MemoryState::kReduced], micro_steps == 1 ? 0 : 4 * kMiB / o)
              << parameter << " " << optimizer;
          EXPECT_EQ(memory[MemoryState::kGathered], element * kMiB);
        }
      }
    }
  }
}

TEST(MemoryPlan, SumsAreDividedByTheDegreeOfGradientsOrOfTheUpdateWhicheverIsLess) {
  // 1,048,576 parameters on 8 ranks: 4 MiB of sums.
  constexpr std::uint64_t kMiB = 1U << 20U;
  for (const int stage : {0, 2, 3}) {
    for (const auto& [optimizer, gradient] : {std::pair{8, 1}, {8, 2}, {8, 4}, {8, 8}, {4, 2}, {2, 4}}) {
      ShardingPlan plan = zero_plan(stage, {"dp"});
      if (stage > 0) plan.optimizer_degree = optimizer;
      if (stage == 3) plan.parameter_degree = 2;
      plan.gradient_degree = gradient;
      const ModelLayout model =
          make_model_layout({{.name = "w", .shape = {1024, 1024}}}, {{.name = "root", .params = {0}}}, plan.degrees(8));
      for (const int rank : {0, 5}) {
        const auto divisor = static_cast<std::uint64_t>(stage == 0 ? gradient : std::min(optimizer, gradient));
        EXPECT_EQ(plan_memory(model, plan, rank, 2, 2)[MemoryState::kReduced], 4 * kMiB / divisor)
            << stage << " " << gradient;
        EXPECT_EQ(plan_memory(model, plan, rank, 2, 1)[MemoryState::kReduced], 0U)
            << "in the bucket, where it is not needed again";
      }
    }
  }
}

RC_GTEST_PROP(MemoryPlanProperty, GroupsOfRanksAddUpToOneModelEach, ()) {
  const auto random = test::any_model();
  const auto parameter = *rc::gen::inRange(1, 4);
  const auto optimizer = parameter * *rc::gen::inRange(1, 4);
  const auto world = optimizer * *rc::gen::inRange(1, 4);
  ShardingPlan plan = zero_plan(3, {"dp"});
  plan.parameter_degree = parameter;
  plan.optimizer_degree = optimizer;
  const ModelLayout model = make_model_layout(random.params, random.units, plan.degrees(world));
  const MemorySnapshot whole =
      plan_memory(make_model_layout(random.params, random.units, 1), zero_plan(0, {"dp"}), 0, 2, 1);
  for (const auto& [state, degree] : {std::pair{MemoryState::kParameter, parameter},
                                      {MemoryState::kMaster, optimizer},
                                      {MemoryState::kOptimizer, optimizer}}) {
    for (int first = 0; first < world; first += degree) {
      std::uint64_t sum = 0;
      for (int rank = first; rank < first + degree; ++rank) sum += plan_memory(model, plan, rank, 2, 1)[state];
      RC_ASSERT(sum == whole[state]);
    }
  }
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
    EXPECT_EQ(mib(stage, MemoryState::kReduced), 0) << "the one bucket takes the sums";
    EXPECT_EQ(mib(stage, MemoryState::kGathered), gathered[stage]);
  }
}

TEST(MemoryPlan, GradientsLieInTheirBucketAsTheyAreComputed) {
  std::vector<ParamSpec> params{{.name = "w", .shape = {8, 1024}, .dtype = DType::kBFloat16},
                                {.name = "norm", .shape = {4, 1024}},
                                {.name = "tied", .shape = {4, 1024}, .dtype = DType::kBFloat16, .aliases = {"head"}},
                                {.name = "vector", .shape = {1024}, .dtype = DType::kBFloat16}};
  std::vector<UnitSpec> units{{.name = "blocks.0", .params = {0, 1}, .repeated = true},
                              {.name = "blocks.1", .params = {2, 3}, .repeated = true}};
  const auto narrow = [&](int stage, int world, int micro_steps, ReductionPolicy policy) {
    ShardingPlan plan = zero_plan(stage, {"dp"});
    plan.policy = policy;
    const std::vector<DType> dtypes = bucket_dtypes(make_model_layout(params, units, world), plan, micro_steps);
    EXPECT_EQ(dtypes[1], DType::kFloat32);
    EXPECT_EQ(dtypes[2], DType::kFloat32) << "what comes is the sum of two gradients";
    EXPECT_EQ(dtypes[3], DType::kFloat32) << "torch has wide gradients for some";
    return dtypes[0] == DType::kBFloat16;
  };
  for (const int stage : {1, 2, 3}) {
    EXPECT_TRUE(narrow(stage, 2, 1, ReductionPolicy::kPerStep));
    EXPECT_TRUE(narrow(stage, 4, 3, ReductionPolicy::kPerMicroStep));
    EXPECT_FALSE(narrow(stage, 2, 2, ReductionPolicy::kPerStep)) << "micro-steps are added there";
    EXPECT_FALSE(narrow(stage, 1, 1, ReductionPolicy::kPerStep)) << "nobody reads it";
  }
  EXPECT_FALSE(narrow(0, 2, 1, ReductionPolicy::kPerStep)) << "sums are gathered there";
  const ModelLayout four = make_model_layout(params, units, 4);
  const MemorySnapshot memory = plan_memory(four, zero_plan(1, {"dp"}), 0, 2, 1);
  EXPECT_EQ(memory[MemoryState::kBucket], 1024U * (8 * 2 + 4 * 4 + 4 * 4 + 4));
  EXPECT_EQ(memory[MemoryState::kReduced], 1024U * 2 * 4) << "of w alone";
  EXPECT_EQ(wide_slots(four, zero_plan(1, {"dp"}), 1).total_bytes(), 1024U * 8 * 4);
  EXPECT_EQ(wide_slots(four, zero_plan(0, {"dp"}), 1).total_bytes(), 0U);
  ShardingPlan wide = zero_plan(1, {"dp"});
  wide.narrow_buckets = false;
  EXPECT_EQ(bucket_dtypes(four, wide, 1), std::vector<DType>(4, DType::kFloat32));
  units[0].repeated = false;
  EXPECT_FALSE(narrow(1, 2, 1, ReductionPolicy::kPerStep)) << "such a unit may use a parameter twice";
}

test::RandomModel eight_blocks() {
  test::RandomModel model;
  for (int unit = 0; unit < 8; ++unit) {
    model.params.push_back({.name = std::to_string(unit), .shape = {4, 1024}});
    model.units.push_back({.name = std::to_string(unit), .params = {unit}, .repeated = true});
  }
  return model;
}

TEST(MemoryPlan, TiersHaveWhatThePlanHas) {
  auto [params, units] = eight_blocks();
  const ModelLayout model = make_model_layout(params, units, 2);
  const std::vector<StateDeclaration> states = element_states(2);
  const auto tiers = [&](const ResidencyPlan& residency, const auto& check) {
    ShardingPlan plan = zero_plan(2, {"dp"});
    plan.residency = residency;
    const TierTable table = plan_tiers(model, plan, 1, states, 1, 4096);
    const MemorySnapshot memory = plan_memory(model, plan, 1, states, 1);
    for (std::size_t state = 0; state < kNumMemoryStates; ++state)
      EXPECT_EQ(table.rows[state].device + table.rows[state].host, memory.bytes[state]) << state;
    EXPECT_EQ(table.total().files, plan_file_bytes(model, plan, 1, states, 1, 4096));
    check(table.rows[static_cast<std::size_t>(MemoryState::kOptimizer)], table.total());
    return memory.total();
  };
  const auto resident = tiers({}, [](const TierBytes& optimizer, const TierBytes& total) {
    EXPECT_GT(optimizer.device, 0U);
    EXPECT_EQ(total.host + total.files, 0U);
  });
  (void)tiers({.optimizer = Residency::kHost}, [resident](const TierBytes& optimizer, const TierBytes& total) {
    EXPECT_EQ(optimizer.device, 0U);
    EXPECT_EQ(total.host, optimizer.host);
    EXPECT_EQ(total.device + total.host, resident);
  });
  ResidencyPlan filed{.optimizer = Residency::kFiles, .block_elements = 1024};
  (void)tiers(filed, [](const TierBytes& optimizer, const TierBytes& total) {
    EXPECT_EQ(optimizer.device + optimizer.host, 0U);
    EXPECT_GT(total.host, 0U) << "the slots";
    EXPECT_EQ(total.files, optimizer.files);
  });
  filed.optimizer_in_files = {false, true};  // the ratio, 1, says it of the others
  filed.cache_blocks = 2;
  (void)tiers(filed, [](const TierBytes& optimizer, const TierBytes& total) {
    EXPECT_EQ(optimizer.host, 8192U) << "one block, of two moments";
    EXPECT_EQ(total.host, 8192U + (4 + 2) * 8192U);
  });
}

TEST(MemoryPlan, SumsLieInBucketsWhereThatIsNotMore) {
  auto [params, units] = eight_blocks();
  const ModelLayout two = make_model_layout(params, units, 2);
  const ModelLayout alone = make_model_layout(params, units, 1);
  const ShardingPlan sharded = zero_plan(2, {"dp"});
  ShardingPlan wide = sharded;
  wide.ring_slots = 4;
  ShardingPlan per_step = sharded;
  per_step.policy = ReductionPolicy::kPerStep;
  const std::vector<bool> all(8, true);
  const std::vector<bool> none(8, false);
  const auto first = [](int count) {
    std::vector<bool> chosen(8, false);
    std::fill_n(chosen.begin(), count, true);
    return chosen;
  };
  EXPECT_EQ(sums_in_buckets(two, sharded, 1), first(2)) << "a ring of two: nothing comes into it after them";
  EXPECT_EQ(sums_in_buckets(two, wide, 1), first(4));
  EXPECT_EQ(sums_in_buckets(alone, sharded, 1), all);
  EXPECT_EQ(sums_in_buckets(alone, sharded, 2), none) << "a bucket is used in every micro-step";
  EXPECT_EQ(sums_in_buckets(two, per_step, 2), all) << "but not here";
  for (const int stage : {0, 1}) EXPECT_EQ(sums_in_buckets(two, zero_plan(stage, {"dp"}), 1), all);
  EXPECT_EQ(plan_memory(two, sharded, 0, 2, 1)[MemoryState::kReduced], 6U * 2 * 1024 * 4);
  EXPECT_EQ(plan_memory(two, wide, 0, 2, 1)[MemoryState::kReduced], 4U * 2 * 1024 * 4);
  EXPECT_EQ(plan_memory(two, wide, 0, 2, 1)[MemoryState::kBucket], 4U * 4 * 1024 * 4);
  // A slot of the largest unit, and half of that unit's sums beside it, are more than buckets for both.
  for (ParamSpec& param : params) param.trainable = false;
  params[0].trainable = params[7].trainable = true;
  params[7].shape = {400, 1024};
  ShardingPlan narrow = sharded;
  narrow.ring_slots = 1;
  std::vector<bool> trained(8, false);  // frozen flats have no sums
  trained[0] = trained[7] = true;
  EXPECT_EQ(sums_in_buckets(make_model_layout(params, units, 2), narrow, 1), trained);
}

TEST(MemoryPlan, OneUnitAndWhatIsGatheredAheadHaveSlots) {
  auto [params, units] = eight_blocks();
  const ModelLayout model = make_model_layout(params, units, 2);
  const auto slots = [&model](int prefetch, int ring) {
    ShardingPlan plan = zero_plan(3, {"dp"});
    plan.prefetch_units = prefetch;
    plan.ring_slots = ring;
    return gathered_slots(model, plan).slot_bytes.size();
  };
  EXPECT_EQ(slots(0, 2), 1U);
  EXPECT_EQ(slots(1, 2), 2U);
  EXPECT_EQ(slots(3, 2), 2U) << "ring_slots is the most";
  EXPECT_EQ(slots(3, 5), 4U);
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
