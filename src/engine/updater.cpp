#include "engine/updater.h"

#include "engine/own_writes.h"

#include <zeroth/base/error.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

namespace zeroth {
namespace {

constexpr std::int64_t kRounded = 16'384;  // elements whose sums are rounded at a time
constexpr std::int64_t kTaken =
    16'384;  // elements whose writes are taken at a time: the update finds them in the cache

/// Calls body(first, end, sums) for parts of n sums in `narrow`, widened to `accumulation`. `from` has them in `dtype`,
/// which is one of both.
template <class Body>
void for_rounded(const std::byte* from, DType dtype, DType narrow, DType accumulation, std::int64_t n, Kernels& kernels,
                 const Stream& stream, const Body& body) {
  const std::int64_t most = kernels.on_host() ? std::min(kRounded, n) : n;
  const Scratch half = kernels.make_scratch(dtype == narrow ? 0 : array_bytes(most, narrow));
  const Scratch whole = kernels.make_scratch(array_bytes(most, accumulation));
  for (std::int64_t begin = 0; begin < n; begin += most) {
    const std::int64_t part = std::min(most, n - begin);
    const std::byte* rounded = from + array_bytes(begin, dtype);
    if (dtype != narrow) {
      kernels.convert(half.bytes.data(), narrow, rounded, dtype, part, stream);
      rounded = half.bytes.data();
    }
    kernels.convert(whole.bytes.data(), accumulation, rounded, narrow, part, stream);
    body(begin, begin + part, whole.bytes.data());
  }
  if (!kernels.on_host()) kernels.settle(stream);  // the scratch goes
}

bool has_shape(const Optimizer& optimizer, StateShape shape) {
  return std::ranges::any_of(optimizer.states(), [shape](const StateDeclaration& one) { return one.shape == shape; });
}

}  // namespace

Updater::Updater(const ModelLayout& layout, const Optimizer& optimizer, ModelMemory& memory, CommBackend& backend,
                 Kernels& kernels, Kernels& host, Stream stream)
    : layout_(layout),
      optimizer_(optimizer),
      memory_(memory),
      backend_(backend),
      kernels_(kernels),
      host_(host),
      stream_(std::move(stream)),
      up_(memory.bus() == nullptr ? Stream() : memory.bus()->up()),
      num_states_(optimizer.states().size()),
      has_facts_(optimizer.has_facts()),
      has_entries_of_tensors_(has_shape(optimizer, StateShape::kTensor) || has_shape(optimizer, StateShape::kRow)),
      has_entries_of_rows_(has_shape(optimizer, StateShape::kRow)),
      steps_(layout.params.size(), 0),
      scales_(layout.params.size(), 1.0),
      local_steps_(layout.params.size(), 0),
      updated_(layout.flats.size(), false) {
  for (int flat = 0; flat < static_cast<int>(layout.flats.size()); ++flat) {
    if (layout.flat(flat).trainable) last_order_.push_back(flat);
  }
}

std::vector<Updater::Run> Updater::runs_of(int flat, const std::vector<bool>& has_grad) const {
  const FlatLayout& layout = layout_.flat(flat);
  const Range range = memory_.update_range(flat);
  std::vector<Run> runs;
  bool joinable = false;  // the run before ends where this parameter begins
  for (auto segment = layout.segments.begin(); segment != layout.segments.end(); ++segment) {
    if (segment->numel == 0) continue;
    // Padding is zero in values, gradients and states, and stays zero under every update: it goes with the parameter
    // before it.
    const auto next =
        std::find_if(segment + 1, layout.segments.end(), [](const Segment& other) { return other.numel > 0; });
    const std::int64_t padded = next == layout.segments.end() ? layout.length : next->offset;
    const std::int64_t end = separates_tensors() ? segment->range().end : padded;
    const Range part = intersect({segment->offset, end}, range);
    if (part.size() == 0) continue;
    const auto param = static_cast<std::size_t>(segment->param);
    if (!has_grad[param]) {
      joinable = false;
      continue;
    }
    const Run run{part, layout_.params[param].group, steps_[param] + 1, segment->param};
    if (joinable && runs.back().group == run.group && runs.back().step == run.step) {
      runs.back().range.end = part.end;
    } else {
      runs.push_back(run);
    }
    joinable = !separates_tensors();
  }
  return runs;
}

void Updater::add_pieces(int flat, const Run& run, std::vector<Piece>& pieces) {
  const FlatLayout& layout = layout_.flat(flat);
  const std::size_t element = reads_sums() ? size_of(layout.accumulation()) : 0;
  const auto add = [&](const Range& part, const std::byte* sums) {
    for (std::int64_t at = part.begin; at < part.end;) {
      const std::int64_t end = std::min(part.end, memory_.together(flat, at).end);
      pieces.push_back({.flat = flat,
                        .range = {at, end},
                        .step = run.step,
                        .group = run.group,
                        .param = run.param,
                        .sums = sums == nullptr ? nullptr : sums + static_cast<std::size_t>(at - part.begin) * element,
                        .beside_device = !from_messages_ && sums != nullptr && sums_beside_device()});
      at = end;
    }
  };
  if (!reads_sums()) return add(run.range, nullptr);
  if (!own_sums_.empty())
    return add(run.range,
               own_sums_[static_cast<std::size_t>(flat)] + static_cast<std::size_t>(run.range.begin) * element);
  if (is_held_) {
    const std::int64_t in_held = run.range.begin - memory_.update_range(flat).begin;
    return add(run.range, memory_.held(flat) + static_cast<std::size_t>(in_held) * element);
  }
  for (int owner = 0; owner < layout.world(); ++owner) {
    const Range shard = layout.shard(owner);
    const Range part = intersect(run.range, shard);
    if (part.size() == 0) continue;
    add(part, sums_of(flat, owner) + static_cast<std::size_t>(part.begin - shard.begin) * element);
    count_sums(owner, static_cast<std::size_t>(part.size()) * element);
  }
}

const std::byte* Updater::sums_of(int flat, int owner) {
  return owner == memory_.rank() ? memory_.reduced(flat) : memory_.peer_reduced(flat, owner);
}

void Updater::count_sums(int owner, std::size_t bytes) {
  if (owner != memory_.rank() && memory_.one_sided())
    backend_.count_one_sided(CollectiveKind::kAllGather, owner, bytes);
}

void Updater::hold() {
  for (int flat = 0; flat < static_cast<int>(layout_.flats.size()); ++flat) {
    const FlatLayout& layout = layout_.flat(flat);
    if (!layout.trainable) continue;
    const Range updated = memory_.update_range(flat);
    const DType accumulation = layout.accumulation();
    for (int owner = 0; owner < layout.world(); ++owner) {
      const Range shard = layout.shard(owner);
      const Range part = intersect(updated, shard);
      if (part.size() == 0) continue;
      const std::size_t bytes = array_bytes(part.size(), accumulation);
      Kernels& kernels = memory_.sums_leave_device() ? host_ : kernels_;
      kernels.copy(memory_.held(flat) + array_bytes(part.begin - updated.begin, accumulation),
                   sums_of(flat, owner) + array_bytes(part.begin - shard.begin, accumulation), bytes, stream_);
      count_sums(owner, bytes);
    }
  }
  is_held_ = true;
}

bool Updater::brings_parameter(int flat) const {
  return memory_.filed_parameters() == nullptr && master_of(layout_.flat(flat).dtype) != Master::kWhole;
}

void Updater::update_piece(const Piece& piece, const StateView& view, const Place& place, double factor,
                           const GroupHyper& hyper) {
  const FlatLayout& layout = layout_.flat(piece.flat);
  const DType accumulation = layout.accumulation();
  const Range& updated = piece.range;
  const bool on_bus = memory_.updates_cross_bus();
  Kernels& kernels = on_bus ? host_ : kernels_;
  const auto update_with = [&](std::int64_t begin, std::int64_t end, const std::byte* sums) {
    std::vector<std::byte*> states(num_states_);
    for (std::size_t state = 0; state < num_states_; ++state) {
      states[state] = view.state(static_cast<int>(state), updated.begin + begin);
    }
    const StepBlock block{.param = place.param + array_bytes(begin, layout.dtype),
                          .low = view.master_low(updated.begin + begin),
                          .master = view.master(updated.begin + begin),
                          .states = states,
                          .grad = sums,
                          .n = end - begin,
                          .dtype = accumulation,
                          .factor = factor * layout.grad_factor * (own_sums_.empty() ? 1.0 : layout.world()),
                          .step = piece.step,
                          .hyper = hyper,
                          .scale = scales_[static_cast<std::size_t>(piece.param)],
                          .from_messages = from_messages_,
                          .local_steps = local_steps_[static_cast<std::size_t>(piece.param)],
                          .committed = committed_};
    if (facts_ != nullptr) return measure_part(piece, {updated.begin + begin, updated.begin + end}, block, kernels);
    optimizer_.step(block, kernels, stream_);
  };
  const auto update = [&](std::int64_t begin, std::int64_t end) {
    if (place.sums == nullptr) return update_with(begin, end, nullptr);
    if (memory_.update_dtype(piece.flat) == accumulation)
      return update_with(begin, end, place.sums + array_bytes(begin, accumulation));
    for_rounded(place.sums + array_bytes(begin, place.dtype), place.dtype, memory_.update_dtype(piece.flat),
                accumulation, end - begin, kernels, stream_,
                [&](std::int64_t from, std::int64_t to, const std::byte* sums) {
                  update_with(begin + from, begin + to, sums);
                });
  };
  const bool takes = !on_bus && takes_writes(piece.flat);
  const auto take_and_update = [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t most = has_entries_of_tensors_ || !takes ? end - begin : kTaken;
    for (std::int64_t at = begin; at < end; at += most) {
      const std::int64_t n = std::min(most, end - at);
      if (takes)
        take_writes(view, place.param + array_bytes(at, layout.dtype), updated.begin + at, n, kernels, stream_);
      update(at, at + n);
    }
  };
  if (facts_ != nullptr) {
    for (const Range& block : blocks_of(piece.flat, updated))
      for_measured(block, kernels,
                   [&](const Range& part) { take_and_update(part.begin - updated.begin, part.end - updated.begin); });
    return;
  }
  if (!has_entries_of_tensors_ || (has_facts_ && !has_entries_of_rows_))
    return kernels.for_ranges(updated.size(), take_and_update);
  for (const Range& block : blocks_of(piece.flat, updated))
    take_and_update(block.begin - updated.begin, block.end - updated.begin);
}

void Updater::for_measured(const Range& range, Kernels& kernels, const std::function<void(Range)>& body) {
  constexpr std::int64_t kBlock = kernels::kNormBlock;
  static_assert(kTaken % kBlock == 0 && kRounded >= kTaken);
  const std::int64_t head = std::min(range.end, (range.begin + kBlock - 1) / kBlock * kBlock);
  if (head > range.begin) body({range.begin, head});
  if (!kernels.on_host()) {
    if (range.end > head) body({head, range.end});
    return;
  }
  kernels.for_ranges(range.end - head, [&](std::int64_t begin, std::int64_t end) {
    // The parts that begin in these elements.
    for (std::int64_t at = (begin + kTaken - 1) / kTaken * kTaken; at < end; at += kTaken)
      body({head + at, std::min(head + at + kTaken, range.end)});
  });
}

void Updater::measure_part(const Piece& piece, const Range& part, const StepBlock& block, Kernels& kernels) {
  constexpr std::int64_t kBlock = kernels::kNormBlock;
  const std::size_t facts = facts_->facts().size();
  const std::int64_t blocks = (part.size() + kBlock - 1) / kBlock;
  const std::size_t bytes = static_cast<std::size_t>(blocks) * facts * sizeof(double);
  std::vector<double> on_host;
  double* words = nullptr;
  if (kernels.on_host()) {
    on_host.resize(static_cast<std::size_t>(blocks) * facts);
    words = on_host.data();
  } else {
    measured_words_.push_back(kernels.make_words(bytes));
    words = reinterpret_cast<double*>(measured_words_.back().bytes.data());
  }
  std::vector<double*> measures;
  for (std::size_t fact = 0; fact < facts; ++fact) measures.push_back(words + static_cast<std::int64_t>(fact) * blocks);
  optimizer_.measure(block, measures, kernels, stream_);
  // Boundaries of pieces are boundaries of blocks, so a block is inside a rank's own piece or outside of it.
  Range own = part;
  if (!facts_->is_local()) own = counts_ ? intersect(part, layout_.flat(piece.flat).shard(memory_.rank())) : Range{};
  if (own.size() <= 0) return;
  const std::int64_t first = (own.begin - part.begin + kBlock - 1) / kBlock;
  const std::int64_t last = (own.end - part.begin + kBlock - 1) / kBlock;
  const int tensor = tensors_[static_cast<std::size_t>(piece.param)];
  for (std::size_t fact = 0; fact < facts; ++fact) {
    const std::span<const double> counted(measures[fact] + first, static_cast<std::size_t>(last - first));
    if (kernels.on_host()) {
      facts_->add(tensor, fact, counted);
    } else {
      measured_.push_back({.tensor = tensor, .fact = fact, .blocks = counted});
    }
  }
}

void Updater::measure(const std::vector<bool>& has_grad, const UpdateTerms& terms, TensorFacts& facts) {
  update_flats(flats_left(), has_grad, terms, &facts);
  if (!kernels_.on_host()) kernels_.settle(stream_);
  for (const Measured& measured : measured_) facts.add(measured.tensor, measured.fact, measured.blocks);
  measured_.clear();
  measured_words_.clear();
  is_measured_ = true;
}

void Updater::move_tensor_states(int flat, std::int64_t element, std::vector<double>& values, bool write) {
  if (!has_entries_of_tensors_) return;
  Kernels& kernels = memory_.updates_cross_bus() ? host_ : kernels_;
  for (const ModelMemory::Placed& placed : memory_.states()) {
    const StateRow& row = placed.row;
    if (row.kind != StateKind::kOptimizer || row.flat != flat || row.shape != StateShape::kTensor) continue;
    ZR_ASSERT(row.dtype == DType::kFloat64, "states of tensors of an optimizer with facts are doubles");
    std::byte* const at = placed.at.in_memory() + array_bytes(entry_of(layout_, row, element), row.dtype);
    double& value = values[static_cast<std::size_t>(row.which)];
    if (write) {
      kernels.copy(at, &value, sizeof(double), stream_);
    } else {
      kernels.copy(&value, at, sizeof(double), stream_);
    }
  }
}

void Updater::conclude(const std::vector<bool>& has_grad, const UpdateTerms& terms, const TensorFacts& facts) {
  for (const int flat : flats_left()) {
    const Range range = memory_.update_range(flat);
    for (const Segment& segment : layout_.flat(flat).segments) {
      const auto param = static_cast<std::size_t>(segment.param);
      const Range part = intersect(segment.range(), range);
      if (!has_grad[param] || part.size() <= 0) continue;
      std::vector<double> states(num_states_, 0.0);
      move_tensor_states(flat, part.begin, states, /*write=*/false);
      const std::vector<double> values = facts.of(tensors_[param]);
      GroupHyper hyper = terms.groups[static_cast<std::size_t>(layout_.params[param].group)];
      hyper.lr *= terms.lr_factor;
      scales_[param] = optimizer_.conclude({.facts = values,
                                            .states = states,
                                            .step = steps_[param] + 1,
                                            .hyper = hyper,
                                            .from_messages = from_messages_});
      move_tensor_states(flat, part.begin, states, /*write=*/true);
    }
  }
}

bool Updater::takes_writes(int flat) const {
  return memory_.shows_rest() && kernels_.on_host() && master_of(layout_.flat(flat).dtype) != Master::kNone;
}

void Updater::take_all_writes() {
  for (const int flat : last_order_) {
    if (!takes_writes(flat)) continue;
    const Range range = memory_.update_range(flat);
    for (std::int64_t at = range.begin; at < range.end;) {
      const std::int64_t end = std::min(range.end, memory_.together(flat, at).end);
      const StateView view = memory_.view(flat, at, Access::kUpdate);
      std::byte* const param = view.parameter(at);
      const DType dtype = layout_.flat(flat).dtype;
      kernels_.for_ranges(end - at, [&, first = at](std::int64_t from, std::int64_t to) {
        take_writes(view, param + array_bytes(from, dtype), first + from, to - from, kernels_, stream_);
      });
      at = end;
    }
  }
}

std::vector<Range> Updater::blocks_of(int flat, const Range& range) const {
  if (!has_entries_of_rows_) return {range};
  const std::vector<Segment>& segments = layout_.flat(flat).segments;
  const auto segment =
      std::ranges::find_if(segments, [&](const Segment& one) { return intersect(one.range(), range).size() > 0; });
  const std::int64_t length = row_length(layout_.params[static_cast<std::size_t>(segment->param)]);
  std::vector<Range> blocks;
  for (std::int64_t begin = range.begin; begin < range.end;) {
    const std::int64_t row = (begin - segment->offset) / length;
    const std::int64_t end = std::min(range.end, segment->offset + (row + 1) * length);
    blocks.push_back({begin, end});
    begin = end;
  }
  return blocks;
}

Updater::Crossing Updater::cross(const Piece& piece, BusSlot slot) {
  const FlatLayout& layout = layout_.flat(piece.flat);
  const auto n = piece.range.size();
  Crossing crossing{.slot = std::move(slot), .sums = piece.sums, .dtype = layout.accumulation()};
  if (piece.sums != nullptr && !piece.beside_device) {
    const DType dtype = memory_.update_dtype(piece.flat);
    const std::byte* sums = piece.sums;
    if (dtype != layout.accumulation()) {
      // Rounded on the device, so half as many bytes cross.
      std::byte* const rounded = crossing.slot.on_device().data();
      const Stream& down = memory_.bus()->down();
      down.enqueue([this, rounded, dtype, sums, from = layout.accumulation(), n, down] {
        kernels_.convert(rounded, dtype, sums, from, n, down);
      });
      sums = rounded;
    }
    crossing.slot.fetch(0, sums, array_bytes(n, dtype));
    crossing.sums = crossing.slot.bytes().data();
    crossing.dtype = dtype;
    crossing.param_at = align_up(array_bytes(n, dtype), kSegmentAlignBytes);
  }
  if (brings_parameter(piece.flat)) {
    const std::byte* const param =
        memory_.parameters(piece.flat) +
        array_bytes(piece.range.begin - memory_.rest_range(piece.flat, memory_.rank()).begin, layout.dtype);
    crossing.slot.fetch(crossing.param_at, param, array_bytes(n, layout.dtype));
  }
  return crossing;
}

void Updater::cross_ahead(std::span<const Piece> next) {
  DeviceBus& bus = *memory_.bus();
  for (std::size_t ahead = crossings_.size(); ahead < next.size(); ++ahead) {
    std::optional<BusSlot> slot = ahead == 0 ? bus.take() : bus.try_take();
    if (!slot) return;
    crossings_.push_back(cross(next[ahead], std::move(*slot)));
  }
}

void Updater::update_beside_device(std::span<const Piece> next, const StateView& view, double factor,
                                   const GroupHyper& hyper) {
  const Piece& piece = next.front();
  const FlatLayout& layout = layout_.flat(piece.flat);
  cross_ahead(next);
  Crossing crossing = std::move(crossings_.front());
  crossings_.pop_front();
  crossing.slot.wait();
  std::byte* const in_slot = crossing.slot.bytes().data();
  const bool in_blocks = memory_.filed_parameters() != nullptr;
  std::byte* const param = in_blocks ? view.parameter(piece.range.begin) : in_slot + crossing.param_at;
  update_piece(piece, view, {.param = param, .sums = crossing.sums, .dtype = crossing.dtype}, factor, hyper);
  if (in_blocks || facts_ != nullptr) return;
  crossing.slot.send(crossing.param_at, view.parameter(piece.range.begin),
                     array_bytes(piece.range.size(), layout.dtype), up_);
}

void Updater::update_on_device(const Piece& piece, const std::shared_ptr<StateView>& view, double factor,
                               const GroupHyper& hyper) {
  const FlatLayout& layout = layout_.flat(piece.flat);
  const auto n = piece.range.size();
  const std::size_t sum_bytes = piece.beside_device ? array_bytes(n, layout.accumulation()) : 0;
  const std::size_t param_bytes = memory_.filed_parameters() == nullptr ? 0 : array_bytes(n, layout.dtype);
  Return back{
      .slot = memory_.bus()->take(), .param_at = align_up(sum_bytes, kSegmentAlignBytes), .piece = piece, .view = view};
  const auto bring = [&](std::size_t at, const std::byte* from, std::size_t bytes) {
    if (bytes == 0) return;
    host_.copy(back.slot.bytes().data() + at, from, bytes, stream_);
    back.slot.send(at, back.slot.on_device().data() + at, bytes, stream_);
  };
  bring(0, piece.sums, sum_bytes);
  bring(back.param_at, view->parameter(piece.range.begin), param_bytes);
  std::byte* const on_device = back.slot.on_device().data();
  update_piece(piece, *view,
               {.param = param_bytes > 0 ? on_device + back.param_at : view->parameter(piece.range.begin),
                .sums = sum_bytes > 0 ? on_device : piece.sums,
                .dtype = layout.accumulation()},
               factor, hyper);
  if (param_bytes == 0 || facts_ != nullptr) return;
  memory_.bus()->down().order_after(stream_.record());
  back.slot.fetch(back.param_at, on_device + back.param_at, param_bytes);
  returns_.push_back(std::move(back));
  take_back(1);
}

void Updater::take_back(std::size_t left) {
  for (; returns_.size() > left; returns_.pop_front()) {
    Return& back = returns_.front();
    back.slot.wait();
    host_.copy(back.view->parameter(back.piece.range.begin), back.slot.bytes().data() + back.param_at,
               array_bytes(back.piece.range.size(), layout_.flat(back.piece.flat).dtype), stream_);
  }
}

void Updater::look_ahead(std::span<const Piece> next, std::span<const int> flats) {
  constexpr int kMostLooks = 1024;  // at states in memory, between those in files
  int blocks = memory_.views_ahead() == 0 ? 0 : memory_.views_ahead() + 1;
  int looks = kMostLooks;
  const auto fetch = [&](int flat, std::int64_t element) {
    if (memory_.prefetch_states(flat, element)) --blocks;
    --looks;
  };
  int flat = -1;
  Range together{};
  for (const Piece& piece : next) {
    if (blocks <= 0 || looks <= 0) return;
    if (piece.flat == flat && piece.range.begin < together.end) continue;  // comes with the one before
    flat = piece.flat;
    together = memory_.together(flat, piece.range.begin);
    fetch(flat, piece.range.begin);
  }
  for (const int other : last_order_) {
    if (is_updated(other) || std::ranges::find(flats, other) != flats.end()) continue;
    const Range range = memory_.update_range(other);
    for (std::int64_t at = range.begin; at < range.end; at = memory_.together(other, at).end) {
      if (blocks <= 0 || looks <= 0) return;
      fetch(other, at);
    }
  }
}

void Updater::update_flats(std::span<const int> flats, const std::vector<bool>& has_grad, const UpdateTerms& terms,
                           TensorFacts* facts) {
  facts_ = facts;
  std::vector<Piece> pieces;
  for (const int flat : flats) {
    for (const Run& run : runs_of(flat, has_grad)) add_pieces(flat, run, pieces);
  }
  const bool on_bus = memory_.updates_cross_bus();
  const bool to_device = !on_bus && memory_.bus() != nullptr;
  crossings_.clear();  // of an update that an error ended
  returns_.clear();
  if (on_bus) memory_.bus()->down().order_after(stream_.record());
  std::shared_ptr<StateView> view;  // of the elements that come together: one lease, and one write
  Range together{};
  int viewed = -1;
  for (std::size_t next = 0; next < pieces.size(); ++next) {
    const Piece& piece = pieces[next];
    const std::span<const Piece> rest = std::span<const Piece>(pieces).subspan(next);
    if (piece.flat != viewed || piece.range.begin >= together.end) {
      view.reset();
      look_ahead(rest, flats);
      view = std::make_shared<StateView>(memory_.view(piece.flat, piece.range.begin, Access::kUpdate));
      together = memory_.together(piece.flat, piece.range.begin);
      viewed = piece.flat;
    }
    GroupHyper hyper = terms.groups[static_cast<std::size_t>(piece.group)];
    hyper.lr *= terms.lr_factor;
    if (on_bus) {
      update_beside_device(rest, *view, terms.factor, hyper);
    } else if (to_device) {
      update_on_device(piece, view, terms.factor, hyper);
    } else {
      const Place place{.param = view->parameter(piece.range.begin),
                        .sums = piece.sums,
                        .dtype = layout_.flat(piece.flat).accumulation()};
      update_piece(piece, *view, place, terms.factor, hyper);
    }
  }
  view.reset();
  take_back(0);
  if (on_bus) stream_.order_after(up_.record());
  if (std::exchange(facts_, nullptr) != nullptr) return;
  for (const int flat : flats) {
    updated_[static_cast<std::size_t>(flat)] = true;
    order_.push_back(flat);
  }
}

void Updater::forget_updated() {
  order_.clear();
  updated_.assign(updated_.size(), false);
  crossings_.clear();
  returns_.clear();
}

std::vector<int> Updater::flats_left() const {
  std::vector<int> flats;
  std::ranges::copy_if(last_order_, std::back_inserter(flats), [this](int flat) { return !is_updated(flat); });
  return flats;
}

void Updater::update(const std::vector<bool>& has_grad, const UpdateTerms& terms) {
  update_flats(flats_left(), has_grad, terms, nullptr);
  last_order_ = std::exchange(order_, {});
  updated_.assign(updated_.size(), false);
  is_held_ = false;
  is_measured_ = false;
  own_sums_.clear();
  for (std::size_t param = 0; param < has_grad.size(); ++param) {
    if (has_grad[param]) ++steps_[param];
  }
}

}  // namespace zeroth
