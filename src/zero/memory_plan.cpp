#include "zero/coded_calls.h"
#include "zero/signals.h"

#include <zeroth/offload/stores.h>
#include <zeroth/shard/degrees.h>
#include <zeroth/zero/memory_plan.h>

#include <algorithm>
#include <functional>
#include <map>
#include <vector>

namespace zeroth {
namespace {

/// What one call brings to a rank.
struct WireCounts {
  std::function<std::int64_t(const FlatLayout& flat, int from, int to)>
      gather;  ///< elements, to go from one degree to a lower one
  /// bytes, to sum parts at degree `to` of what is `dtype` into parts at `from`
  std::function<std::uint64_t(const FlatLayout& flat, int from, int to, DType dtype)> reduce;
  /// The ranks from which the messages of one hop of codes come.
  std::function<std::vector<int>(int from, int to)> senders;
  int rank = 0;
};

/// Bytes of the gathers of one flat in a step, `gathers` of them, of parameters that travel in codes.
std::uint64_t coded_gathers(const ShardingPlan& plan, const Degrees& degrees, const FlatLayout& flat,
                            std::uint64_t gathers, const WireCounts& count) {
  const CodeHop hop = hop_of_parameters(degrees);
  std::uint64_t bytes = 0;
  for (const int sender : count.senders(hop.from, hop.to))
    bytes += static_cast<std::uint64_t>(form_of_parameters(plan.codes).bytes(flat.part(sender, hop.from).size()));
  if (!keeps_node_parts(plan, degrees)) return bytes * gathers;
  return bytes * std::min<std::uint64_t>(gathers, 1) + array_bytes(count.gather(flat, hop.to, 1), flat.dtype) * gathers;
}

/// Bytes of one reduction.
std::uint64_t coded_reduction(const ShardingPlan& plan, const Degrees& degrees, const FlatLayout& flat,
                              const WireCounts& count) {
  std::uint64_t bytes = 0;
  for (const CodeHop& hop : hops_of_gradients(degrees)) {
    bytes += count.senders(hop.from, hop.to).size() *
             static_cast<std::uint64_t>(form_of_gradients(plan.codes).bytes(flat.part(count.rank, hop.from).size()));
  }
  return bytes;
}

/// A step's calls, counted.
WireBytes wire_of(const ModelLayout& model, const ShardingPlan& plan, int micro_steps, const WireCounts& count,
                  std::span<const int> gathers = {}) {
  WireBytes wire;
  const Degrees degrees = plan.degrees(model.world);
  const auto steps = static_cast<std::uint64_t>(micro_steps);
  const std::vector<DType> dtypes = bucket_dtypes(model, plan, micro_steps);
  for (std::size_t index = 0; index < model.flats.size(); ++index) {
    const FlatLayout& flat = model.flats[index];
    const bool codes = has_codes(flat) && model.world > 1;
    if (plan.gathers_parameters() && codes && plan.codes.parameter_bits > 0) {
      wire.gather_parameters +=
          coded_gathers(plan, degrees, flat, planned_gathers(model, plan, flat.unit, micro_steps, gathers), count);
    } else if (plan.gathers_parameters()) {
      wire.gather_parameters += array_bytes(count.gather(flat, degrees.parameter, 1), flat.dtype) *
                                planned_gathers(model, plan, flat.unit, micro_steps, gathers);
    }
    if (!flat.trainable) continue;
    const std::uint64_t coded = codes && plan.codes.gradient_bits > 0 ? coded_reduction(plan, degrees, flat, count) : 0;
    const bool between_runs = degrees.sums_groups();
    const std::uint64_t reduction =
        coded > 0 && !between_runs ? coded : count.reduce(flat, degrees.gradient, 1, dtypes[index]);
    wire.reduce_gradients += reduction * (plan.policy == ReductionPolicy::kPerMicroStep ? steps : 1);
    if (between_runs) {
      wire.reduce_gradients +=
          coded > 0 ? coded : count.reduce(flat, model.world, degrees.gradient, flat.accumulation());
    }
    wire.gather_gradients += array_bytes(count.gather(flat, model.world, degrees.sums), flat.accumulation());
    wire.publish_parameters += array_bytes(count.gather(flat, degrees.optimizer, degrees.parameter), flat.dtype);
  }
  return wire;
}

/// How many ranks of each node the sub-group has, 0 if not everywhere as many.
int per_node(const SubGroup& group, const std::vector<int>& node_of) {
  std::map<int, int> ranks;
  for (int index = 0; index < group.count; ++index) ++ranks[node_of[static_cast<std::size_t>(group.rank(index))]];
  const int first = ranks.begin()->second;
  return std::ranges::all_of(ranks, [first](const auto& node) { return node.second == first; }) ? first : 0;
}

/// Ranks of the sub-group on other nodes from which `rank` receives parts: all, or its counterparts where what
/// crosses does so once.
std::vector<int> far_senders(const SubGroup& group, int rank, const std::vector<int>& node_of, bool two_levels) {
  const int places = two_levels ? per_node(group, node_of) : 0;
  std::vector<int> senders;
  for (int index = 0; index < group.count; ++index) {
    const int other = group.rank(index);
    const bool far = node_of[static_cast<std::size_t>(other)] != node_of[static_cast<std::size_t>(rank)];
    const bool counterpart = places <= 1 || index % places == group.index_of(rank) % places;
    if (far && counterpart) senders.push_back(other);
  }
  return senders;
}

/// Bytes of the blocks of states, by where they rest.
struct SplitBlocks {
  std::vector<std::size_t> in_memory{};
  std::vector<std::size_t> in_files{};
};

SplitBlocks split_blocks(std::span<const StateRow> rows, const ResidencyPlan& residency, BlockSet set) {
  SplitBlocks split;
  for (const StateBlock& block : state_blocks(rows, residency, set))
    (block.in_files ? split.in_files : split.in_memory).push_back(block.bytes);
  return split;
}

/// How gradient buckets lie.
struct Buckets {
  std::vector<std::size_t> bytes{};       ///< one a flat
  std::vector<std::size_t> wide_bytes{};  ///< beyond the plan, one a flat
  bool ring = true;                       ///< repeated units share slots
  std::vector<bool> hold_sums{};          ///< one a flat
};

Buckets plan_buckets(const ModelLayout& model, const ShardingPlan& plan, int micro_steps) {
  Buckets buckets;
  const std::vector<DType> dtypes = bucket_dtypes(model, plan, micro_steps);
  const bool once = micro_steps == 1 || plan.policy == ReductionPolicy::kPerStep;
  const bool leave = plan.sums_leave_device(model.world);
  for (std::size_t flat = 0; flat < model.flats.size(); ++flat) {
    const FlatLayout& layout = model.flats[flat];
    const bool wide = dtypes[flat] == layout.accumulation();
    buckets.bytes.push_back(layout.trainable ? array_bytes(layout.length, dtypes[flat]) : 0);
    buckets.wide_bytes.push_back(layout.trainable && !wide ? layout.accumulation_bytes() : 0);
    buckets.hold_sums.push_back(once && layout.trainable && wide && !leave);
  }
  // What has left the device needs no bucket any more, whatever the placement. Gradients of messages do not leave it.
  const bool stays = plan.holds_messages || plan.accumulates_in_buckets(micro_steps);
  buckets.ring = leave ? !stays : !plan.holds_all_buckets(micro_steps);
  if (!buckets.ring || !once || leave) return buckets;
  const SlotTable ring = make_slot_table(model, buckets.bytes, true, plan.ring_slots);
  // Backward goes through the model from its end: the first unit of a slot is the last to use it.
  std::vector<bool> last(model.units.size(), false);
  std::vector<bool> taken(ring.slot_bytes.size(), false);
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    if (ring.unit_slot[unit] < 0) continue;
    const auto slot = static_cast<std::size_t>(ring.unit_slot[unit]);
    last[unit] = !taken[slot];
    taken[slot] = true;
  }
  std::size_t all = 0;
  std::size_t shards = 0;  // one whole of them
  std::vector<bool> in_ring = buckets.hold_sums;
  for (std::size_t flat = 0; flat < model.flats.size(); ++flat) {
    all += buckets.bytes[flat];
    if (!last[static_cast<std::size_t>(model.flats[flat].unit)]) {
      if (buckets.hold_sums[flat]) shards += buckets.bytes[flat];
      in_ring[flat] = false;
    }
  }
  const auto world = static_cast<std::size_t>(model.world);
  const Degrees degrees = plan.degrees(model.world);
  const std::size_t wholes = world / static_cast<std::size_t>(std::min(degrees.gradient, degrees.sums));
  buckets.ring = world * all > world * ring.total_bytes() + wholes * shards;
  if (buckets.ring) buckets.hold_sums = in_ring;
  return buckets;
}

}  // namespace

bool keeps_gathered(const ModelLayout& model, const ShardingPlan& plan, int unit) {
  if (plan.reshard == Reshard::kAll || plan.reshard == Reshard::kStep) return false;
  if (plan.reshard == Reshard::kNone) return true;
  const auto index = static_cast<std::size_t>(unit);
  if (!model.units[index].repeated) return true;
  const bool last = std::none_of(model.units.begin() + unit + 1, model.units.end(),
                                 [](const UnitSpec& other) { return other.repeated; });
  return last && plan.ring_slots >= 2;
}

std::uint64_t planned_gathers(const ModelLayout& model, const ShardingPlan& plan, int unit, int micro_steps,
                              std::span<const int> gathers) {
  if (!plan.gathers_parameters()) return 0;
  if (!gathers.empty()) return static_cast<std::uint64_t>(gathers[static_cast<std::size_t>(unit)]);
  if (plan.reshard == Reshard::kStep) return 1;
  const UnitSpec& spec = model.units[static_cast<std::size_t>(unit)];
  // What a use keeps for its backward is there for the uses after it, too, unless they come after others of the ring.
  const bool shares_slot = spec.repeated && plan.reshard == Reshard::kDefault;
  int of_micro_step = 2 * spec.uses;
  if (keeps_gathered(model, plan, unit)) of_micro_step = shares_slot ? 2 * spec.uses - 1 : spec.uses;
  return static_cast<std::uint64_t>(micro_steps) * static_cast<std::uint64_t>(of_micro_step);
}

SlotTable gathered_slots(const ModelLayout& model, const ShardingPlan& plan) {
  std::vector<std::size_t> bytes;
  for (const FlatLayout& flat : model.flats) bytes.push_back(plan.gathers_parameters() ? flat.bytes() : 0);
  const bool each_its_own = plan.reshard == Reshard::kNone || plan.reshard == Reshard::kStep;
  return make_slot_table(model, bytes, !each_its_own, std::min(plan.ring_slots, 1 + plan.prefetch_units));
}

std::vector<DType> bucket_dtypes(const ModelLayout& model, const ShardingPlan& plan, int micro_steps) {
  const bool narrow = plan.narrow_buckets && model.world > 1 && !plan.gathers_into_buckets() &&
                      !plan.accumulates_in_buckets(micro_steps) &&
                      !plan.sums_leave_device(model.world);  // sums are formed in the bucket that they leave
  std::vector<DType> dtypes;
  for (const FlatLayout& flat : model.flats) {
    const bool tied = std::ranges::any_of(flat.segments, [&model](const Segment& segment) {
      return !model.params[static_cast<std::size_t>(segment.param)].aliases.empty();
    });
    const bool repeated = model.units[static_cast<std::size_t>(flat.unit)].repeated;
    // Sums of fp16 and fp32 sources together, for a gradient that comes wide on some ranks, are not built.
    const bool summable = flat.dtype != DType::kFloat16;
    dtypes.push_back(narrow && summable && repeated && !flat.vectors && !tied ? flat.dtype : flat.accumulation());
  }
  return dtypes;
}

std::vector<bool> sums_in_buckets(const ModelLayout& model, const ShardingPlan& plan, int micro_steps) {
  return plan_buckets(model, plan, micro_steps).hold_sums;
}

SlotTable bucket_slots(const ModelLayout& model, const ShardingPlan& plan, int micro_steps) {
  const Buckets buckets = plan_buckets(model, plan, micro_steps);
  return make_slot_table(model, buckets.bytes, buckets.ring, plan.ring_slots);
}

SlotTable wide_slots(const ModelLayout& model, const ShardingPlan& plan, int micro_steps) {
  const Buckets buckets = plan_buckets(model, plan, micro_steps);
  return make_slot_table(model, buckets.wide_bytes, buckets.ring, plan.ring_slots);
}

Range sums_range(const ModelLayout& model, const ShardingPlan& plan, int flat, int rank) {
  const FlatLayout& layout = model.flat(flat);
  const Degrees degrees = plan.degrees(model.world);
  return layout.part(rank, plan.gathers_into_buckets() ? degrees.gradient : std::min(degrees.gradient, degrees.sums));
}

std::size_t control_bytes(const ModelLayout& model) {
  return SignalLayout(static_cast<int>(model.flats.size()), model.world).bytes();
}

MemorySnapshot plan_memory(const ModelLayout& model, const ShardingPlan& plan, int rank,
                           std::span<const StateDeclaration> states, int micro_steps) {
  MemorySnapshot memory;
  const auto add = [&memory](MemoryState state, std::size_t bytes) {
    memory.bytes[static_cast<std::size_t>(state)] += bytes;
  };
  const std::vector<StateRow> rows = state_table(model, plan, rank, states, micro_steps);
  for (const StateRow& row : rows) {
    if (!row.in_blocks) add(row.memory(), row.bytes());
  }
  for (const BlockSet set : kBlockSets) {
    const SplitBlocks blocks = split_blocks(rows, plan.residency, set);
    add(memory_of_blocks(set), memory_store_memory(blocks.in_memory));
    if (blocks.in_files.empty()) continue;
    const int slots = block_slots(model, plan.residency, rows, set);
    add(MemoryState::kStaging, file_store_memory(blocks.in_files, {.slots = slots}));
    if (const int places = plan.residency.cache_blocks; places > 0 && set == BlockSet::kUpdates)
      add(MemoryState::kStaging, cached_store_memory(blocks.in_files, {.places = places}));
  }
  add(MemoryState::kStaging, bus_memory(model, plan, rank));
  const CodeMemory codes = code_memory(model, plan, rank);
  add(MemoryState::kStaging, codes.messages());
  add(MemoryState::kParameter, codes.node_parts);
  add(MemoryState::kBucket, bucket_slots(model, plan, micro_steps).total_bytes());
  add(MemoryState::kGathered, gathered_slots(model, plan).total_bytes());
  add(MemoryState::kControl, control_bytes(model));
  return memory;
}

std::uint64_t plan_file_bytes(const ModelLayout& model, const ShardingPlan& plan, int rank,
                              std::span<const StateDeclaration> states, int micro_steps, std::size_t stripe_bytes) {
  const std::vector<StateRow> rows = state_table(model, plan, rank, states, micro_steps);
  std::uint64_t bytes = 0;
  for (const BlockSet set : kBlockSets) {
    const SplitBlocks blocks = split_blocks(rows, plan.residency, set);
    if (!blocks.in_files.empty()) bytes += file_store_bytes(blocks.in_files, {.stripe_bytes = stripe_bytes});
  }
  return bytes;
}

MemorySnapshot plan_memory(const ModelLayout& model, const ShardingPlan& plan, int rank, int optimizer_states,
                           int micro_steps) {
  return plan_memory(model, plan, rank, element_states(optimizer_states), micro_steps);
}

WireBytes plan_wire(const ModelLayout& model, const ShardingPlan& plan, int rank, int micro_steps,
                    std::span<const int> gathers) {
  return wire_of(model, plan, micro_steps,
                 {.gather = [rank](const FlatLayout& flat, int from,
                                   int to) { return flat.part(rank, to).size() - flat.part(rank, from).size(); },
                  // An owner pulls its range from each of the others.
                  .reduce =
                      [rank](const FlatLayout& flat, int from, int to, DType dtype) {
                        return array_bytes(flat.part(rank, from).size(), dtype) *
                               static_cast<std::uint64_t>(from / to - 1);
                      },
                  .senders =
                      [rank](int from, int to) {
                        const SubGroup group = sub_group_of(rank, from, to);
                        std::vector<int> others;
                        for (int index = 0; index < group.count; ++index) {
                          if (group.rank(index) != rank) others.push_back(group.rank(index));
                        }
                        return others;
                      },
                  .rank = rank},
                 gathers);
}

WireBytes plan_far_wire(const ModelLayout& model, const ShardingPlan& plan, int rank, int micro_steps,
                        const NodeLevels& nodes) {
  std::vector<int> node_of;
  for (std::size_t node = 0; node < nodes.node_sizes.size(); ++node) {
    node_of.insert(node_of.end(), static_cast<std::size_t>(nodes.node_sizes[node]), static_cast<int>(node));
  }
  const auto senders = [&](const SubGroup& group) { return far_senders(group, rank, node_of, nodes.two_levels); };
  return wire_of(
      model, plan, micro_steps,
      {.gather =
           [&](const FlatLayout& flat, int from, int to) {
             const std::vector<int> path =
                 nodes.one_sided ? std::vector{from, to} : plan.degrees(model.world).path(from, to);
             std::int64_t elements = 0;
             for (std::size_t step = 1; step < path.size(); ++step) {
               for (const int sender : senders(sub_group_of(rank, path[step - 1], path[step])))
                 elements += flat.part(sender, path[step - 1]).size();
             }
             return elements;
           },
       .reduce =
           [&](const FlatLayout& flat, int from, int to, DType dtype) {
             const SubGroup group = sub_group_of(rank, from, to);
             const bool sums = nodes.two_levels && per_node(group, node_of) > 1;
             return array_bytes(flat.part(rank, from).size(), sums ? flat.accumulation() : dtype) *
                    senders(group).size();
           },
       .senders = [&](int from, int to) { return far_senders(sub_group_of(rank, from, to), rank, node_of, false); },
       .rank = rank});
}

}  // namespace zeroth
