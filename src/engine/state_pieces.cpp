#include "engine/state_pieces.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace zeroth {
namespace {

/// The logical tensor of a state, and the box of it that the parameter has.
BoxRange box_of(const ParamSpec& spec, StateShape shape) {
  const std::vector<std::int64_t>& logical = spec.logical_shape.empty() ? spec.shape : spec.logical_shape;
  if (has_elements(shape)) {
    BoxRange box{.logical = logical, .offset = spec.box_offset, .shape = spec.shape};
    if (spec.logical_shape.empty()) {
      box.offset.assign(spec.shape.size(), 0);
      box.order = spec.memory_order;
    }
    if (spec.box_parts == 1) return box;
    // Blocks of a dimension become a dimension.
    box.viewed = box.logical;
    const auto at = static_cast<std::ptrdiff_t>(spec.box_parts_dim);
    for (std::vector<std::int64_t>* extents : {&box.logical, &box.shape}) {
      (*extents)[static_cast<std::size_t>(at)] /= spec.box_parts;
      extents->insert(extents->begin() + at, spec.box_parts);
    }
    box.offset.insert(box.offset.begin() + at, 0);
    return box;
  }
  if (shape == StateShape::kTensor || logical.size() < 2) return BoxRange::of_whole({1}, 0, 0);
  return {.logical = {logical[0]},
          .offset = {spec.logical_shape.empty() ? 0 : spec.box_offset[0]},
          .shape = {spec.shape[0]}};
}

/// Entries whose first element is in `range`, where each has `length` elements and the first begins at `offset`.
Range entries_that_begin_in(const Range& range, std::int64_t offset, std::int64_t numel, std::int64_t length) {
  const auto first_from = [&](std::int64_t element) {
    const std::int64_t from = std::clamp<std::int64_t>(element - offset, 0, numel);
    return (from + length - 1) / length;
  };
  return {first_from(range.begin), std::max(first_from(range.begin), first_from(range.end))};
}

/// The elements of a segment that share an entry of a state.
std::int64_t entry_length(const ModelLayout& model, const StateRow& row, const Segment& segment) {
  if (has_elements(row.shape)) return 1;
  if (row.shape == StateShape::kTensor) return segment.numel;
  return row_length(model.params[static_cast<std::size_t>(segment.param)]);
}

/// Writes into `piece` which entries of a state the elements `part` of a segment have, and where the first lies.
/// `part`: within the flat parameter, not empty.
void place_entries(StatePiece& piece, const ModelLayout& model, const ModelMemory::Placed& placed,
                   const Segment& segment, const Range& part) {
  const auto& [row, at] = placed;
  const std::int64_t length = entry_length(model, row, segment);
  piece.has.begin = (part.begin - segment.offset) / length;
  piece.has.end = (part.end - 1 - segment.offset) / length + 1;
  piece.data =
      at.after(has_elements(row.shape) ? part.begin - row.range.begin : entry_of(model, row, part.begin), row.dtype);
}

/// With an entry for each element of a parameter, or for each of its rows.
bool is_state_of_param(StateKind kind, bool with_held) {
  return kind == StateKind::kOptimizer || kind == StateKind::kAverage || kind == StateKind::kOuter ||
         (with_held && kind == StateKind::kHeld);
}

}  // namespace

BoxRange whole_box(const ParamSpec& spec) {
  BoxRange box = box_of(spec, StateShape::kElement);
  box.begin = 0;
  box.end = spec.numel();
  return box;
}

std::vector<StatePiece> state_pieces(const ModelLayout& model, const ModelMemory& memory, bool is_first, int job_rank,
                                     bool with_held) {
  std::map<int, const ModelMemory::Placed*> masters;  // by flat
  for (const ModelMemory::Placed& placed : memory.states()) {
    if (placed.row.kind == StateKind::kMaster) masters[placed.row.flat] = &placed;
  }
  std::vector<StatePiece> pieces;
  for (const ModelMemory::Placed& placed : memory.states()) {
    const StateRow& row = placed.row;
    if (row.kind != StateKind::kParameter && !is_state_of_param(row.kind, with_held)) continue;
    const FlatLayout& flat = model.flat(row.flat);
    for (const Segment& segment : flat.segments) {
      const Range part = intersect(segment.range(), row.range);
      if (segment.numel == 0 || part.size() == 0) continue;
      const ParamSpec& spec = model.params[static_cast<std::size_t>(segment.param)];
      StatePiece piece{.param = segment.param,
                       .state = row.kind == StateKind::kParameter ? "weight" : row.name,
                       .dtype = row.dtype,
                       .has = box_of(spec, row.shape)};
      place_entries(piece, model, placed, segment, part);
      piece.writes = entries_that_begin_in(flat.shard(memory.rank()), segment.offset, segment.numel,
                                           entry_length(model, row, segment));
      if (row.shape == StateShape::kRank) {
        piece.state += "@" + std::to_string(job_rank);
        piece.writes = {piece.has.begin, piece.has.end};
      } else if (!is_first) {
        piece.writes = {};
      }
      const auto master = masters.find(row.flat);
      if (row.kind == StateKind::kParameter && master != masters.end()) {
        const StateRow& kept = master->second->row;
        const Range kept_part = intersect(segment.range(), kept.range);
        piece.dtype = flat.accumulation();
        piece.master = master_of(flat.dtype);
        piece.master_range = {kept_part.begin - segment.offset, kept_part.end - segment.offset};
        piece.master_data = master->second->at.after(kept_part.begin - kept.range.begin, kept.dtype);
      }
      pieces.push_back(std::move(piece));
    }
  }
  return pieces;
}

std::vector<StateOfParam> described_states(const ModelLayout& model, const ModelMemory& memory, bool with_held) {
  std::set<int> mastered;  // flats
  for (const ModelMemory::Placed& placed : memory.states()) {
    if (placed.row.kind == StateKind::kMaster) mastered.insert(placed.row.flat);
  }
  std::vector<StateOfParam> states;
  for (const auto& [row, at] : memory.states()) {
    const bool is_parameter = row.kind == StateKind::kParameter;
    if ((!is_parameter && !is_state_of_param(row.kind, with_held)) || row.shape == StateShape::kRank) continue;
    const FlatLayout& flat = model.flat(row.flat);
    for (const Segment& segment : flat.segments) {
      const ParamSpec& spec = model.params[static_cast<std::size_t>(segment.param)];
      states.push_back({.param = segment.param,
                        .state = is_parameter ? "weight" : row.name,
                        .dtype = is_parameter && mastered.contains(row.flat) ? flat.accumulation() : row.dtype,
                        .logical = box_of(spec, row.shape).logical});
    }
  }
  return states;
}

std::vector<StatePiece> replica_pieces(const ModelLayout& model, const ModelMemory& memory, bool after_messages) {
  const bool are_replicas = after_messages || memory.degrees().optimizer == 1;
  std::vector<StatePiece> pieces;
  for (const ModelMemory::Placed& placed : memory.states()) {
    const StateRow& row = placed.row;
    const bool compared = row.kind != StateKind::kSums && row.kind != StateKind::kHeld &&
                          row.shape != StateShape::kRank && row.shape != StateShape::kPiece &&
                          (row.shape != StateShape::kReplica || are_replicas);
    if (!compared) continue;
    for (const Segment& segment : model.flat(row.flat).segments) {
      const Range part = intersect(segment.range(), row.range);
      StatePiece piece{.param = segment.param, .state = row.name, .dtype = row.dtype, .has = {}};
      if (part.size() > 0) place_entries(piece, model, placed, segment, part);
      pieces.push_back(std::move(piece));
    }
  }
  return pieces;
}

std::vector<StatePiece> parameter_pieces(const ModelLayout& model, const ModelMemory& memory, bool is_first) {
  std::vector<StatePiece> pieces;
  for (const ModelMemory::Placed& placed : memory.states()) {
    const StateRow& row = placed.row;
    if (row.kind != StateKind::kParameter) continue;
    const FlatLayout& flat = model.flat(row.flat);
    for (const Segment& segment : flat.segments) {
      const Range part = intersect(segment.range(), row.range);
      if (segment.numel == 0 || part.size() == 0) continue;
      StatePiece piece{.param = segment.param,
                       .state = "param",
                       .dtype = row.dtype,
                       .has = box_of(model.params[static_cast<std::size_t>(segment.param)], row.shape)};
      place_entries(piece, model, placed, segment, part);
      if (is_first)
        piece.writes = entries_that_begin_in(flat.shard(memory.rank()), segment.offset, segment.numel, /*length=*/1);
      pieces.push_back(std::move(piece));
    }
  }
  return pieces;
}

std::vector<StatePiece> gradient_pieces(const ModelLayout& model, ModelMemory& memory, bool is_first,
                                        const std::function<bool(int flat)>& has_sums, double factor) {
  std::vector<StatePiece> pieces;
  for (int index = 0; index < static_cast<int>(model.flats.size()); ++index) {
    const FlatLayout& flat = model.flat(index);
    if (!flat.trainable || !has_sums(index)) continue;
    const Range shard = flat.shard(memory.rank());
    for (const Segment& segment : flat.segments) {
      const Range part = intersect(segment.range(), shard);
      if (segment.numel == 0 || part.size() == 0) continue;
      StatePiece piece{.param = segment.param,
                       .state = "grad",
                       .dtype = flat.accumulation(),
                       .has = box_of(model.params[static_cast<std::size_t>(segment.param)], StateShape::kElement)};
      piece.has.begin = part.begin - segment.offset;
      piece.has.end = part.end - segment.offset;
      if (is_first) piece.writes = {piece.has.begin, piece.has.end};
      piece.data = StateBytes(memory.reduced(index) + array_bytes(part.begin - shard.begin, piece.dtype));
      piece.scaled = true;
      piece.factor = factor * flat.grad_factor;
      pieces.push_back(std::move(piece));
    }
  }
  return pieces;
}

}  // namespace zeroth
