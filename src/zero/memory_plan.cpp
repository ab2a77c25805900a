#include <zeroth/zero/memory_plan.h>

#include <algorithm>

#include "zero/pages.h"
#include "zero/signals.h"

namespace zeroth {
namespace {

std::uint64_t others_bytes(const FlatLayout& flat, int rank, DType dtype) {
  return static_cast<std::uint64_t>(flat.length - flat.shard(rank).size()) * size_of(dtype);
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
  return make_slot_table(model, bytes, plan.reshard != Reshard::kNone, plan.ring_slots);
}

SlotTable bucket_slots(const ModelLayout& model, const ShardingPlan& plan, int micro_steps) {
  std::vector<std::size_t> bytes;
  for (const FlatLayout& flat : model.flats) bytes.push_back(flat.trainable ? flat.accumulation_bytes() : 0);
  return make_slot_table(model, bytes, !plan.holds_all_buckets(micro_steps), plan.ring_slots);
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
  for (const FlatLayout& flat : model.flats) {
    const std::int64_t shard = flat.shard(rank).size();
    add(MemoryState::kParameter, paged(plan.parameter == Placement::kFlat ? shard : flat.length, flat.dtype));
    if (!flat.trainable) continue;
    const DType accumulation = flat.accumulation();
    const std::int64_t updated = plan.optimizer == Placement::kFlat ? shard : flat.length;
    if (accumulation != flat.dtype) add(MemoryState::kMaster, paged(updated, accumulation));
    add(MemoryState::kOptimizer, static_cast<std::size_t>(optimizer_states) * paged(updated, accumulation));
    add(MemoryState::kReduced, paged(shard, accumulation));
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
    const auto pulled = static_cast<std::uint64_t>(flat.shard(rank).size()) * size_of(flat.accumulation()) *
                        static_cast<std::uint64_t>(model.world - 1);
    wire.reduce_gradients += pulled * (plan.policy == ReductionPolicy::kPerMicroStep ? steps : 1);
    if (plan.gathers_gradients()) wire.gather_gradients += others_bytes(flat, rank, flat.accumulation());
    if (plan.publishes_parameters() && !plan.gathers_parameters()) wire.publish_parameters += parameters;
  }
  return wire;
}

}  // namespace zeroth
