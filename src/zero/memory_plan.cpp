#include <zeroth/zero/memory_plan.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "zero/signals.h"

namespace zeroth {
namespace {

std::uint64_t others_bytes(const FlatLayout& flat, int rank, DType dtype) {
  return array_bytes(flat.length - flat.shard(rank).size(), dtype);
}

/// One a flat.
std::vector<std::size_t> bucket_bytes(const ModelLayout& model) {
  std::vector<std::size_t> bytes;
  for (const FlatLayout& flat : model.flats) bytes.push_back(flat.trainable ? flat.accumulation_bytes() : 0);
  return bytes;
}

}  // namespace

bool keeps_gathered(const ModelLayout& model, const ShardingPlan& plan, int unit) {
  if (plan.reshard == Reshard::kAll) return false;
  if (plan.reshard == Reshard::kNone) return true;
  const auto index = static_cast<std::size_t>(unit);
  if (!model.units[index].repeated) return true;
  const bool last = std::none_of(model.units.begin() + unit + 1, model.units.end(), [](const UnitSpec& other) {
    return other.repeated;
  });
  return last && plan.ring_slots >= 2;
}

SlotTable gathered_slots(const ModelLayout& model, const ShardingPlan& plan) {
  std::vector<std::size_t> bytes;
  for (const FlatLayout& flat : model.flats) bytes.push_back(plan.gathers_parameters() ? flat.bytes() : 0);
  return make_slot_table(model, bytes, plan.reshard != Reshard::kNone, std::min(plan.ring_slots, 1 + plan.prefetch_units));
}

std::vector<bool> sums_in_buckets(const ModelLayout& model, const ShardingPlan& plan, int micro_steps) {
  const std::size_t units = model.units.size();
  if (micro_steps > 1 && plan.policy != ReductionPolicy::kPerStep) return std::vector<bool>(units, false);
  if (plan.holds_all_buckets(micro_steps)) return std::vector<bool>(units, true);
  const std::vector<std::size_t> bytes = bucket_bytes(model);
  const SlotTable ring = make_slot_table(model, bytes, true, plan.ring_slots);
  // Backward goes through the model from its end: the first unit of a slot is the last to use it.
  std::vector<bool> in_ring(units, false);
  std::vector<bool> taken(ring.slot_bytes.size(), false);
  for (std::size_t unit = 0; unit < units; ++unit) {
    if (ring.unit_slot[unit] < 0) continue;
    const auto slot = static_cast<std::size_t>(ring.unit_slot[unit]);
    in_ring[unit] = !taken[slot];
    taken[slot] = true;
  }
  std::size_t all = 0;
  std::size_t shards = 0;  // of all ranks: one whole
  for (std::size_t flat = 0; flat < bytes.size(); ++flat) {
    all += bytes[flat];
    if (!in_ring[static_cast<std::size_t>(model.flats[flat].unit)]) shards += bytes[flat];
  }
  const auto world = static_cast<std::size_t>(model.world);
  return world * all <= world * ring.total_bytes() + shards ? std::vector<bool>(units, true) : in_ring;
}

SlotTable bucket_slots(const ModelLayout& model, const ShardingPlan& plan, int micro_steps) {
  const std::vector<bool> in_buckets = sums_in_buckets(model, plan, micro_steps);
  const bool all = plan.holds_all_buckets(micro_steps) || std::ranges::all_of(in_buckets, std::identity{});
  return make_slot_table(model, bucket_bytes(model), !all, plan.ring_slots);
}

std::size_t control_bytes(const ModelLayout& model) {
  return SignalLayout(static_cast<int>(model.flats.size()), model.world).bytes();
}

MemorySnapshot plan_memory(const ModelLayout& model,
                           const ShardingPlan& plan,
                           int rank,
                           int optimizer_states,
                           int micro_steps) {
  MemorySnapshot memory;
  const auto add = [&memory](MemoryState state, std::size_t bytes) {
    memory.bytes[static_cast<std::size_t>(state)] += bytes;
  };
  const std::vector<bool> in_buckets = sums_in_buckets(model, plan, micro_steps);
  for (const FlatLayout& flat : model.flats) {
    const std::int64_t shard = flat.shard(rank).size();
    add(MemoryState::kParameter, array_bytes(plan.parameter == Placement::kFlat ? shard : flat.length, flat.dtype));
    if (!flat.trainable) continue;
    const DType accumulation = flat.accumulation();
    const std::int64_t updated = plan.optimizer == Placement::kFlat ? shard : flat.length;
    if (accumulation != flat.dtype) add(MemoryState::kMaster, array_bytes(updated, flat.dtype));
    add(MemoryState::kOptimizer, static_cast<std::size_t>(optimizer_states) * array_bytes(updated, accumulation));
    if (!in_buckets[static_cast<std::size_t>(flat.unit)]) add(MemoryState::kReduced, array_bytes(shard, accumulation));
  }
  add(MemoryState::kBucket, bucket_slots(model, plan, micro_steps).total_bytes());
  add(MemoryState::kGathered, gathered_slots(model, plan).total_bytes());
  add(MemoryState::kControl, control_bytes(model));
  return memory;
}

WireBytes plan_wire(const ModelLayout& model, const ShardingPlan& plan, int rank, int micro_steps) {
  WireBytes wire;
  const auto steps = static_cast<std::uint64_t>(micro_steps);
  for (const FlatLayout& flat : model.flats) {
    const std::uint64_t parameters = others_bytes(flat, rank, flat.dtype);
    if (plan.gathers_parameters()) {
      wire.gather_parameters += parameters * steps * (keeps_gathered(model, plan, flat.unit) ? 1 : 2);
    }
    if (!flat.trainable) continue;
    // An owner pulls its range from each of the others.
    const auto pulled = array_bytes(flat.shard(rank).size(), flat.accumulation()) * static_cast<std::uint64_t>(model.world - 1);
    wire.reduce_gradients += pulled * (plan.policy == ReductionPolicy::kPerMicroStep ? steps : 1);
    if (plan.gathers_gradients()) wire.gather_gradients += others_bytes(flat, rank, flat.accumulation());
    if (plan.publishes_parameters() && !plan.gathers_parameters()) wire.publish_parameters += parameters;
  }
  return wire;
}

}  // namespace zeroth
