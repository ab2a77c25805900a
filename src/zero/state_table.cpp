#include <zeroth/base/error.h>
#include <zeroth/zero/memory_plan.h>
#include <zeroth/zero/state_table.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace zeroth {
namespace {

/// Entries of a segment's elements `part`, in the flat's coordinates, where each has `length` elements; a rank that has
/// some of an entry's elements has the entry.
std::int64_t entries_in(const Segment& segment, const Range& part, std::int64_t length) {
  if (part.size() == 0) return 0;
  return (part.end - 1 - segment.offset) / length - (part.begin - segment.offset) / length + 1;
}

std::int64_t length_of_entry(const ModelLayout& model, const Segment& segment, StateShape shape) {
  return shape == StateShape::kTensor ? segment.numel
                                      : row_length(model.params[static_cast<std::size_t>(segment.param)]);
}

/// Of gradients. Beside a device, what other ranks take of them stays there.
Residency residency_of_sums(const ShardingPlan& plan, int world) {
  const bool stays = plan.residency.beside_device && !plan.sums_leave_device(world);
  return stays ? Residency::kDevice : plan.residency.gradient;
}

/// What an update needs in blocks, and what a gather reads.
bool has_blocks(StateKind kind) {
  return kind == StateKind::kParameter || kind == StateKind::kMaster || kind == StateKind::kOptimizer;
}

/// Of a state of the optimizer. Whoever updates it has all of it: the host, or, in one memory with it, the device.
Residency residency_of(const ResidencyPlan& plan, StateShape shape) {
  if (shape == StateShape::kElement) return plan.optimizer;
  return plan.updates_cross_bus() ? Residency::kHost : Residency::kDevice;
}

std::int64_t entries_of(const ModelLayout& model, const FlatLayout& flat, const Range& range, StateShape shape) {
  if (has_elements(shape)) return range.size();
  std::int64_t entries = 0;
  for (const Segment& segment : flat.segments) {
    if (segment.numel == 0) continue;
    entries += entries_in(segment, intersect(segment.range(), range), length_of_entry(model, segment, shape));
  }
  return entries;
}

}  // namespace

std::int64_t row_length(const ParamSpec& param) {
  if (param.shape.size() < 2) return std::max<std::int64_t>(param.numel(), 1);
  ZR_CHECK(param.memory_order.empty() || param.memory_order.front() == 0, ErrorCode::kModel,
           "an optimizer with a value for each row needs parameters whose rows follow each other in memory",
           {.where = "zero.state_table",
            .which = param.name,
            .expected = "the first dimension outermost in memory",
            .got = "dimension " + std::to_string(param.memory_order.empty() ? 0 : param.memory_order.front()),
            .hint = "make it contiguous() before the engine is built"});
  return std::accumulate(param.shape.begin() + 1, param.shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::size_t StateRow::bytes() const {
  const std::size_t exact = array_bytes(entries, dtype);
  return (exact + kSegmentAlignBytes - 1) / kSegmentAlignBytes * kSegmentAlignBytes;
}

MemoryState StateRow::memory() const {
  switch (kind) {
    case StateKind::kParameter:
      return MemoryState::kParameter;
    case StateKind::kMaster:
      return MemoryState::kMaster;
    case StateKind::kOptimizer:
    case StateKind::kAverage:  // as large, and at the same ranks
    case StateKind::kOuter:
      return MemoryState::kOptimizer;
    case StateKind::kSums:
    case StateKind::kHeld:
      return MemoryState::kReduced;
  }
  return MemoryState::kOther;
}

std::vector<StateRow> state_table(const ModelLayout& model, const ShardingPlan& plan, int rank,
                                  std::span<const StateDeclaration> states, int micro_steps) {
  const Degrees degrees = plan.degrees(model.world);
  const std::vector<bool> in_buckets = sums_in_buckets(model, plan, micro_steps);
  std::vector<StateRow> rows;
  for (std::size_t index = 0; index < model.flats.size(); ++index) {
    const FlatLayout& flat = model.flats[index];
    const auto add = [&](StateRow row) {
      row.flat = static_cast<int>(index);
      row.unit = flat.unit;
      row.entries = entries_of(model, flat, row.range, row.shape);
      row.in_blocks =
          has_blocks(row.kind) && row.shape == StateShape::kElement && plan.residency.in_blocks(row.residency);
      rows.push_back(std::move(row));
    };
    add({.kind = StateKind::kParameter,
         .name = "parameter",
         .range = flat.part(rank, degrees.parameter),
         .degree = degrees.parameter,
         .dtype = flat.dtype,
         .residency = plan.residency.parameter,
         .shared = plan.shows_parameters()});
    if (!flat.trainable) continue;
    const Range updated = flat.part(rank, degrees.optimizer);
    if (const Master master = master_of(flat.dtype); master != Master::kNone) {
      add({.kind = StateKind::kMaster,
           .name = "master",
           .range = updated,
           .degree = degrees.optimizer,
           .dtype = master == Master::kWhole ? flat.accumulation() : flat.dtype,
           .residency = plan.residency.optimizer});
    }
    for (std::size_t which = 0; which < states.size(); ++which) {
      const StateDeclaration& state = states[which];
      const bool all = state.shape == StateShape::kRank || state.shape == StateShape::kReplica;
      const bool piece = state.shape == StateShape::kPiece;
      add({.kind = StateKind::kOptimizer,
           .which = static_cast<int>(which),
           .name = state.name,
           .range = all     ? Range{0, flat.length}
                    : piece ? flat.shard(rank)
                            : updated,
           .degree = all     ? 1
                     : piece ? model.world
                             : degrees.optimizer,
           .shape = state.shape,
           .dtype = state.dtype.value_or(flat.accumulation()),
           .initial = state.initial,
           .residency = residency_of(plan.residency, state.shape)});
    }
    if (plan.holds_gradients) {
      add({.kind = StateKind::kHeld,
           .name = std::string(kHeldGradient),
           .range = updated,
           .degree = degrees.optimizer,
           .dtype = flat.accumulation(),
           .residency = plan.residency.gradient});
    }
    if (in_buckets[index]) continue;
    add({.kind = StateKind::kSums,
         .name = "sums",
         .range = sums_range(model, plan, static_cast<int>(index), rank),
         .degree = plan.gathers_into_buckets() ? degrees.gradient : std::min(degrees.gradient, degrees.sums),
         .dtype = flat.accumulation(),
         .residency = residency_of_sums(plan, model.world),
         .shared = plan.shares_sums(model.world)});
  }
  return rows;
}

std::vector<StateBlock> state_blocks(std::span<const StateRow> rows, const ResidencyPlan& residency, BlockSet set) {
  const bool updates = set == BlockSet::kUpdates;
  const double ratio = updates ? residency.optimizer_ratio : 1.0;
  const std::vector<bool> chosen = updates ? residency.optimizer_in_files : std::vector<bool>{};
  std::vector<StateBlock> blocks;
  std::int64_t seen = 0;
  std::int64_t in_files = 0;
  for (auto row = rows.begin(); row != rows.end();) {
    const auto next = std::find_if(row, rows.end(), [&](const StateRow& other) { return other.flat != row->flat; });
    std::vector<std::size_t> sizes;  // of an entry, one for each row in blocks
    Range range{};
    bool filed = false;
    for (; row != next; ++row) {
      if (!row->in_blocks || block_set_of(row->kind) != set) continue;
      filed = row->residency == Residency::kFiles;
      sizes.push_back(size_of(row->dtype));
      range = row->range;  // the same for all of them: what this rank updates, or has at rest
    }
    if (sizes.empty()) continue;
    for (std::int64_t at = range.begin; at < range.end; at += residency.block_elements) {
      StateBlock block{.flat = std::prev(next)->flat,
                       .range = {at, std::min(at + residency.block_elements, range.end)}};
      const auto n = static_cast<std::size_t>(block.range.size());
      for (const std::size_t size : sizes) block.bytes += align_up(n * size, kSegmentAlignBytes);
      seen += block.range.size();
      const bool is_next = blocks.size() < chosen.size() ? chosen[blocks.size()]
                                                         : static_cast<double>(in_files + block.range.size()) <=
                                                               ratio * static_cast<double>(seen);
      block.in_files = filed && is_next;
      if (block.in_files) in_files += block.range.size();
      blocks.push_back(block);
    }
  }
  return blocks;
}

namespace {

/// Blocks of parameters in files of each unit, and the elements of the largest one.
struct ParameterBlocks {
  std::vector<int> of_unit;
  int total = 0;
  std::int64_t largest = 0;
};

ParameterBlocks parameter_blocks(const ModelLayout& model, const ResidencyPlan& residency,
                                 std::span<const StateRow> rows) {
  ParameterBlocks blocks{.of_unit = std::vector<int>(model.units.size())};
  for (const StateBlock& block : state_blocks(rows, residency, BlockSet::kParameters)) {
    ++blocks.of_unit[static_cast<std::size_t>(model.flat(block.flat).unit)];
    ++blocks.total;
    blocks.largest = std::max(blocks.largest, block.range.size());
  }
  return blocks;
}

constexpr int kLeastSlots = 2;  // one in use, one on its way

}  // namespace

int block_slots(const ModelLayout& model, const ResidencyPlan& residency, std::span<const StateRow> rows,
                BlockSet set) {
  if (set == BlockSet::kUpdates) return residency.slots;
  ParameterBlocks blocks = parameter_blocks(model, residency, rows);
  if (blocks.total == 0) return kLeastSlots;
  std::int64_t slots = 0;
  if (residency.parameter_elements > 0) {
    slots = residency.parameter_elements / blocks.largest;
  } else {
    // The unit in use, and three ahead.
    const std::size_t units = std::min<std::size_t>(blocks.of_unit.size(), 4);
    std::ranges::partial_sort(blocks.of_unit, blocks.of_unit.begin() + static_cast<std::ptrdiff_t>(units),
                              std::greater{});
    for (std::size_t unit = 0; unit < units; ++unit) slots += blocks.of_unit[unit];
  }
  return static_cast<int>(std::clamp<std::int64_t>(slots, kLeastSlots, std::max(kLeastSlots, blocks.total)));
}

void require_parameter_slots(const ModelLayout& model, const ShardingPlan& plan) {
  const ResidencyPlan& residency = plan.residency;
  if (residency.parameter != Residency::kFiles || residency.parameter_elements == 0) return;
  for (int rank = 0; rank < model.world; ++rank) {
    const ParameterBlocks blocks = parameter_blocks(model, residency, state_table(model, plan, rank, {}, 1));
    if (blocks.total == 0) continue;
    const auto most = std::ranges::max_element(blocks.of_unit);
    const std::int64_t needed = std::max(*most, std::min(kLeastSlots, blocks.total)) * blocks.largest;
    ZR_CHECK(residency.parameter_elements >= needed, ErrorCode::kConfig,
             "the parameters of a unit are more than what may be in memory of parameters in files",
             {.where = "zero.plan",
              .who = "rank " + std::to_string(rank) + "/" + std::to_string(model.world),
              .which = "/zero_optimization/offload_param/max_in_cpu; unit " +
                       model.units[static_cast<std::size_t>(most - blocks.of_unit.begin())].name + " has " +
                       std::to_string(*most) + " blocks of at most " + std::to_string(blocks.largest) + " elements",
              .expected = "at least " + std::to_string(needed) + " elements",
              .got = std::to_string(residency.parameter_elements),
              .hint = "raise it, or leave it out: then the four largest units fit; or lower "
                      "zeroth.offload.block_elements, or use more ranks"});
  }
}

namespace {

/// What a slot of the bus has room for, of one flat.
struct BusNeeds {
  std::size_t slot = 0;
  std::size_t on_device = 0;
};

BusNeeds bus_needs(const ModelLayout& model, const ShardingPlan& plan, int flat, int rank) {
  const ResidencyPlan& residency = plan.residency;
  const Degrees degrees = plan.degrees(model.world);
  const FlatLayout& layout = model.flat(flat);
  const auto bytes_of = [&residency](const Range& range, DType dtype) {
    return align_up(array_bytes(std::min(range.size(), residency.block_elements), dtype), kSegmentAlignBytes);
  };
  const bool gathers = residency.in_blocks(residency.parameter);
  const bool leave = plan.sums_leave_device(model.world);
  BusNeeds needs;
  if (gathers) needs.slot = bytes_of(layout.part(rank, degrees.parameter), layout.dtype);
  if (!layout.trainable) return needs;
  if (leave) needs.slot = std::max(needs.slot, bytes_of(sums_range(model, plan, flat, rank), layout.accumulation()));
  const Range updated = layout.part(rank, degrees.optimizer);
  const std::size_t param = bytes_of(updated, layout.dtype);
  if (!residency.updates_cross_bus()) {  // what the device updates
    needs.on_device = (leave ? bytes_of(updated, layout.accumulation()) : 0) + (gathers ? param : 0);
    needs.slot = std::max(needs.slot, needs.on_device);
    return needs;
  }
  const DType dtype = dtype_of_sums(plan, layout.dtype, layout.accumulation());
  const std::size_t sums = leave ? 0 : bytes_of(updated, dtype);
  needs.slot = std::max(needs.slot, sums + param);
  if (dtype != layout.accumulation()) needs.on_device = sums;
  return needs;
}

BusNeeds bus_needs(const ModelLayout& model, const ShardingPlan& plan, int rank) {
  BusNeeds most;
  for (int flat = 0; plan.residency.beside_device && flat < static_cast<int>(model.flats.size()); ++flat) {
    const BusNeeds needs = bus_needs(model, plan, flat, rank);
    most = {std::max(most.slot, needs.slot), std::max(most.on_device, needs.on_device)};
  }
  return most;
}

}  // namespace

std::size_t bus_slot_bytes(const ModelLayout& model, const ShardingPlan& plan, int rank) {
  return bus_needs(model, plan, rank).slot;
}

std::size_t bus_device_bytes(const ModelLayout& model, const ShardingPlan& plan, int rank) {
  return bus_needs(model, plan, rank).on_device;
}

std::size_t bus_memory(const ModelLayout& model, const ShardingPlan& plan, int rank) {
  return static_cast<std::size_t>(plan.residency.slots) *
         (bus_slot_bytes(model, plan, rank) + bus_device_bytes(model, plan, rank));
}

std::int64_t entry_of(const ModelLayout& model, const StateRow& row, std::int64_t element) {
  if (has_elements(row.shape)) return element - row.range.begin;
  std::int64_t before = 0;
  for (const Segment& segment : model.flat(row.flat).segments) {
    if (segment.numel == 0) continue;
    const std::int64_t length = length_of_entry(model, segment, row.shape);
    const Range part = intersect(segment.range(), row.range);
    if (part.size() > 0 && element < segment.range().end) {
      return before + (element - segment.offset) / length - (part.begin - segment.offset) / length;
    }
    before += entries_in(segment, part, length);
  }
  return before;
}

std::vector<StateDeclaration> element_states(int count) {
  std::vector<StateDeclaration> states;
  for (int state = 0; state < count; ++state) states.push_back({.name = "state" + std::to_string(state)});
  return states;
}

}  // namespace zeroth
