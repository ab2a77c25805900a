#include "zero/call_tags.h"
#include "zero/coded_calls.h"
#include "zero/layout_tag.h"
#include "zero/signals.h"
#include "zero/sub_group.h"

#include <zeroth/base/text.h>
#include <zeroth/zero/parameter_store.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace zeroth {

ParameterStore::ParameterStore(const ModelLayout& model, const ShardingPlan& plan, ModelMemory& memory,
                               CommBackend& backend, Device& device, Stream gather_stream, Kernels& kernels,
                               ParameterBinder& binder, Counters& counters)
    : model_(model),
      plan_(plan),
      memory_(memory),
      backend_(backend),
      device_(device),
      gather_stream_(std::move(gather_stream)),
      kernels_(kernels),
      binder_(binder),
      whole_(std::make_unique<SubGroupPath>(model, backend, memory, memory.degrees().parameter, 1, "parameters")),
      at_rest_(std::make_unique<SubGroupPath>(model, backend, memory, memory.degrees().optimizer,
                                              memory.degrees().parameter, "updates")),
      units_(model.units.size()),
      slot_user_(memory.gathered_table().slot_bytes.size(), -1),
      ring_(ring_positions(model)),
      counters_(counters) {
  node_parts_.resize(model.flats.size());
  if (plan.codes.parameter_bits > 0 && whole_->moves()) {
    codes_ = std::make_unique<CodedGather>(model, plan, *whole_->steps().front(), memory.rank(), kernels,
                                           gather_stream_, device.ledger());
    node_memory_ = kernels.make_arena(code_memory(model, plan, memory.rank()).node_parts, "parameters of the node");
  }
  for (std::size_t flat = 0; codes_ && keeps_node_parts(plan, memory.degrees()) && flat < model.flats.size(); ++flat) {
    const FlatLayout& layout = model.flats[flat];
    if (!has_codes(layout)) continue;
    const std::size_t bytes = align_up(
        array_bytes(layout.part(memory.rank(), memory.degrees().node).size(), layout.dtype), kSegmentAlignBytes);
    node_parts_[flat].data = node_memory_.reserve(bytes, kSegmentAlignBytes).data();
    node_holds_.push_back(device.ledger().hold({layout.unit, MemoryState::kParameter}, bytes));
  }
  const Signals& own = memory_.signals(memory_.rank());
  for (std::size_t flat = 0; flat < model.flats.size(); ++flat) {
    // Constant after this; visible to peers through the first epoch, and through the first bucket that is published.
    own.tag(static_cast<int>(flat)).store(layout_tag(model, model.flats[flat]));
  }
}

ParameterStore::~ParameterStore() = default;

std::byte* ParameterStore::flat_data(int flat) {
  UnitState& unit = units_[static_cast<std::size_t>(model_.flat(flat).unit)];
  if (unit.overflow.capacity() > 0)
    return unit.overflow.data() + memory_.gathered_table().flat_offset[static_cast<std::size_t>(flat)];
  return memory_.gathered(flat);
}

void ParameterStore::acquire(int unit) {
  UnitState& state = units_[static_cast<std::size_t>(unit)];
  ++state.leases;
  if (!sharded()) return;
  note_order(unit);
  try {
    if (!state.gathered) {
      start_gather(unit);
    } else if (memory_.filed_parameters() != nullptr) {
      fetch_ahead(memory_.filed_parameters()->slots());
    }
    finish(unit);
  } catch (...) {
    release(unit);
    throw;
  }
  if (device_.asynchronous() && plan_.prefetch_units > 0) prefetch_next();
}

void ParameterStore::take_part(int unit) {
  start_gather(unit);
  drop(unit);
}

void ParameterStore::forget_order() {
  order_.clear();
  last_order_.clear();
  next_ = 0;
  order_known_ = false;
}

bool ParameterStore::matched() const {
  return whole_->moves() && !whole_->one_sided();
}

void ParameterStore::start_gather(int unit) {
  if (before_gather_ && matched()) before_gather_(unit);
  fetch(unit);
  UnitState& state = units_[static_cast<std::size_t>(unit)];
  const auto slot = memory_.gathered_table().unit_slot[static_cast<std::size_t>(unit)];
  if (slot >= 0) {
    int& user = slot_user_[static_cast<std::size_t>(slot)];
    // A prefetched unit that nobody took yet makes room; a leased one does not.
    if (user >= 0 && user != unit && units_[static_cast<std::size_t>(user)].leases == 0) drop(user);
    if (user >= 0 && user != unit) {
      const std::size_t bytes = memory_.gathered_table().slot_bytes[static_cast<std::size_t>(slot)];
      state.overflow = kernels_.make_arena(bytes, "overflow");
      state.overflow_hold = device_.ledger().hold({unit, MemoryState::kOverflow}, bytes);
      ++counters_.overflow_slots;
    } else {
      user = unit;
    }
  }
  state.gathered = true;
  state.updating = false;
  ++counters_.gathers;
  if (ring_[static_cast<std::size_t>(unit)] >= 0) {
    counters_.live_slots_peak = std::max(counters_.live_slots_peak, ++counters_.live_slots);
  }
  for (const int flat : model_.unit_flats[static_cast<std::size_t>(unit)]) {
    counters_.live_bytes += model_.flat(flat).bytes();
    std::byte* out = flat_data(flat);
    if (codes_ && has_codes(model_.flat(flat))) {
      bring_in_codes(flat, out);
    } else {
      bring(flat, out, *whole_, CallPurpose::kGatherParameters);
    }
  }
  counters_.live_bytes_peak = std::max(counters_.live_bytes_peak, counters_.live_bytes);
  state.ready = gather_stream_.record();
}

void ParameterStore::finish(int unit) {
  UnitState& state = units_[static_cast<std::size_t>(unit)];
  state.ready.wait();
  if (state.bound) return;
  state.bound = true;
  if (compares_digests()) keep_digests(unit);
  for (const int flat : model_.unit_flats[static_cast<std::size_t>(unit)]) binder_.bind(flat, flat_data(flat));
}

void ParameterStore::release(int unit) noexcept {
  UnitState& state = units_[static_cast<std::size_t>(unit)];
  if (--state.leases > 0 || !sharded()) return;
  drop(unit);
}

void ParameterStore::drop(int unit) noexcept {
  UnitState& state = units_[static_cast<std::size_t>(unit)];
  if (!state.gathered) return;
  try {
    state.ready.wait();  // a prefetch nobody used; its slot must be quiet before it is reused
  } catch (...) {        // NOLINT(bugprone-empty-catch): the error belongs to a gather whose result nobody wants
  }
  if (state.bound) look_for_writes(unit);
  for (const int flat : model_.unit_flats[static_cast<std::size_t>(unit)]) {
    counters_.live_bytes -= model_.flat(flat).bytes();
    if (state.bound) binder_.bind(flat, nullptr);
  }
  if (ring_[static_cast<std::size_t>(unit)] >= 0) --counters_.live_slots;
  const auto slot = memory_.gathered_table().unit_slot[static_cast<std::size_t>(unit)];
  if (state.overflow.capacity() == 0) {
    if (slot >= 0) slot_user_[static_cast<std::size_t>(slot)] = -1;
  } else {
    state.overflow = {};
    state.overflow_hold = {};
  }
  state.bound = false;
  state.gathered = false;
}

void ParameterStore::keep_digests(int unit) {
  std::vector<std::uint64_t>& digests = units_[static_cast<std::size_t>(unit)].own_parts;
  digests.clear();
  if (!kernels_.on_host()) return;
  for (const int flat : model_.unit_flats[static_cast<std::size_t>(unit)]) {
    const std::span<const std::byte> own = own_in_slot(flat);
    digests.push_back(digest64({reinterpret_cast<const char*>(own.data()), own.size()}));
  }
}

std::span<const std::byte> ParameterStore::own_in_slot(int flat) {
  const FlatLayout& layout = model_.flat(flat);
  const Range whole = layout.part(memory_.rank(), whole_->to());
  const Range own = layout.part(memory_.rank(), whole_->from());
  return {flat_data(flat) + array_bytes(own.begin - whole.begin, layout.dtype), array_bytes(own.size(), layout.dtype)};
}

void ParameterStore::look_for_writes(int unit) noexcept {
  const UnitState& state = units_[static_cast<std::size_t>(unit)];
  if (!kernels_.on_host() || state.updating) return;
  const std::vector<int>& flats = model_.unit_flats[static_cast<std::size_t>(unit)];
  for (std::size_t index = 0; index < flats.size(); ++index) {
    const int flat = flats[index];
    const FlatLayout& layout = model_.flat(flat);
    const std::span<const std::byte> own = own_in_slot(flat);
    if (own.empty()) continue;
    if (compares_digests()) {
      const bool same = index >= state.own_parts.size() ||
                        digest64({reinterpret_cast<const char*>(own.data()), own.size()}) == state.own_parts[index];
      if (!same) binder_.lose_write(flat, -1);
      continue;
    }
    const std::int64_t begin = layout.part(memory_.rank(), whole_->from()).begin;
    const std::byte* const rest = memory_.parameters_from(flat, begin).in_memory();
    if (rest == own.data()) continue;
    const auto differs = [&](std::size_t at, std::size_t bytes) {
      return std::memcmp(rest + at, own.data() + at, bytes) != 0;
    };
    std::atomic<std::size_t> first{own.size()};
    kernels_.for_ranges(static_cast<std::int64_t>(own.size()), [&](std::int64_t from, std::int64_t to) {
      if (!differs(static_cast<std::size_t>(from), static_cast<std::size_t>(to - from))) return;
      auto at = static_cast<std::size_t>(from);
      while (rest[at] == own[at]) ++at;
      for (std::size_t known = first; at < known && !first.compare_exchange_weak(known, at);) {
      }
    });
    if (first < own.size()) binder_.lose_write(flat, begin + static_cast<std::int64_t>(first / size_of(layout.dtype)));
  }
}

void ParameterStore::bring(int flat, std::byte* out, SubGroupPath& group, CallPurpose purpose) {
  const FlatLayout& layout = model_.flat(flat);
  if (layout.part(memory_.rank(), group.to()).size() == 0) return;
  const Range own = layout.part(memory_.rank(), group.from());
  const std::byte* const part = own_part(flat, out, group);
  if (!group.moves()) {
    if (part == out) return;  // the whole part has come from blocks
    gather_stream_.enqueue([this, out, part, bytes = array_bytes(own.size(), layout.dtype)] {
      kernels_.copy(out, part, bytes, gather_stream_);
    });
    return;
  }
  if (group.one_sided()) {
    gather_stream_.enqueue([this, flat, out, &group] { pull(flat, out, group); });
    return;
  }
  if (before_blocking_) gather_stream_.enqueue(before_blocking_);
  // The call is submitted here, on the caller's thread: so all ranks submit theirs in one order.
  gather_stream_.enqueue([works = group.gather(purpose, layout, layout.dtype, part, out, gather_stream_)] {
    for (const Work& work : works) work.wait();
  });
}

bool ParameterStore::compares_digests() const {
  return memory_.filed_parameters() != nullptr || codes_ != nullptr;
}

void ParameterStore::bring_in_codes(int flat, std::byte* out) {
  const FlatLayout& layout = model_.flat(flat);
  NodePart& kept = node_parts_[static_cast<std::size_t>(flat)];
  if (before_blocking_) gather_stream_.enqueue(before_blocking_);
  const bool keeps = keeps_node_parts(plan_, memory_.degrees());
  if (!keeps || kept.epoch != epoch_) {
    const std::byte* const part = own_part(flat, out, *whole_);
    codes_->gather(CallPurpose::kGatherParameters, layout, part, keeps ? kept.data : out);
    kept.epoch = epoch_;
  }
  if (!keeps) return;
  const Work inside = whole_->steps().back()->gather(CallPurpose::kGatherParameters, layout, layout.dtype, kept.data,
                                                     out, gather_stream_);
  gather_stream_.enqueue([inside] { inside.wait(); });
}

const std::byte* ParameterStore::own_part(int flat, std::byte* out, const SubGroupPath& group) {
  const FlatLayout& layout = model_.flat(flat);
  const Range own = layout.part(memory_.rank(), group.from());
  if (memory_.filed_parameters() == nullptr) return memory_.parameters_from(flat, own.begin).in_memory();
  std::byte* const place = out + array_bytes(own.begin - layout.part(memory_.rank(), group.to()).begin, layout.dtype);
  memory_.bring_parameters(flat, own.begin, {place, array_bytes(own.size(), layout.dtype)}, gather_stream_);
  return place;
}

void ParameterStore::require_version(int flat, int rank, const SubGroupPath& group) {
  const Signals& peer = memory_.signals(rank);
  SignalWord& version = &group == at_rest_.get() ? peer.updated() : peer.epoch(flat);
  if (version.load() < epoch_) {
    const auto unit = static_cast<std::size_t>(model_.flat(flat).unit);
    memory_.local_group().wait_until(
        [&] { return version.load() >= epoch_; },
        {.what = "parameters of unit " + model_.units[unit].name, .ranks = {memory_.local_peers().index_of(rank)}});
  }
  require_same_layout(model_, memory_, flat, rank, "zero.gather", "parameters", "shard");
  const std::uint64_t their_epoch = version.load();
  if (their_epoch == epoch_) [[likely]]
    return;
  throw_other_version(flat, rank, their_epoch);
}

void ParameterStore::throw_other_version(int flat, int rank, std::uint64_t theirs) const {
  ErrorContext context = pull_context(model_, memory_, flat, rank, "zero.gather", "shard");
  context.expected = "epoch " + std::to_string(epoch_) + " on rank " + std::to_string(memory_.rank());
  context.got = "epoch " + std::to_string(theirs) + " on rank " + std::to_string(rank);
  context.hint =
      "all ranks must call step() equally often; with zeroth.update no unit may be used between the backward that "
      "brings its last gradients and step()";
  throw Error(ErrorCode::kMismatch, "a rank offers another version of a shard than this rank needs",
              std::move(context));
}

void ParameterStore::pull(int flat, std::byte* out, const SubGroupPath& group) {
  const FlatLayout& layout = model_.flat(flat);
  const std::int64_t begin = layout.part(memory_.rank(), group.to()).begin;
  for (int index = 0; index < group.sub_group().count; ++index) {
    const int rank = group.sub_group().rank(index);
    const Range part = layout.part(rank, group.from());
    if (part.size() == 0) continue;
    require_version(flat, rank, group);
    const std::size_t element = size_of(layout.dtype);
    std::byte* target = out + static_cast<std::size_t>(part.begin - begin) * element;
    const std::byte* source = memory_.peer_parameters(flat, rank, part.begin);
    if (target == source) continue;
    kernels_.copy(target, source, static_cast<std::size_t>(part.size()) * element, gather_stream_);
    if (&group == whole_.get()) {
      const std::uint64_t after = memory_.signals(rank).epoch(flat).load();
      if (after > epoch_) throw_other_version(flat, rank, after);  // it began to change meanwhile
    }
    if (rank != memory_.rank()) {
      backend_.count_one_sided(CollectiveKind::kAllGather, rank, static_cast<std::uint64_t>(part.size()) * element);
    }
  }
}

void ParameterStore::settle_gathers() {
  if (sharded() && matched()) gather_stream_.synchronize();
}

void ParameterStore::quiesce() {
  for (std::size_t unit = 0; sharded() && unit < units_.size(); ++unit) {
    ZR_CHECK(units_[unit].leases == 0, ErrorCode::kUsage, "the step ends while a unit is still in use",
             {.where = "zero.parameters", .which = "unit " + model_.units[unit].name});
    drop(static_cast<int>(unit));
  }
}

void ParameterStore::begin_update(int flat) {
  UnitState& unit = units_[static_cast<std::size_t>(model_.flat(flat).unit)];
  if (unit.bound && sharded()) look_for_writes(model_.flat(flat).unit);
  unit.updating = true;
  memory_.signals(memory_.rank()).epoch(flat).store(epoch_ + 1);
}

void ParameterStore::publish() {
  ++epoch_;
  last_order_ = std::move(order_);
  order_.clear();
  order_known_ = true;
  next_ = 0;
  const Signals& own = memory_.signals(memory_.rank());
  if (at_rest_->moves()) {
    own.updated().store(epoch_);
    memory_.local_group().notify();
    for (std::size_t flat = 0; flat < model_.flats.size(); ++flat) {
      if (model_.flats[flat].trainable) take_updates(static_cast<int>(flat));
    }
    gather_stream_.synchronize();
  }
  // Only now: others gather here what this rank has just taken, too.
  for (std::size_t flat = 0; flat < model_.flats.size(); ++flat) own.epoch(static_cast<int>(flat)).store(epoch_);
  memory_.local_group().notify();
  if (at_rest_->moves() && at_rest_->one_sided()) await_readers();
  if (memory_.filed_parameters() != nullptr) fetch_ahead(memory_.filed_parameters()->slots());
}

void ParameterStore::await_readers() {
  std::vector<int> readers;
  for (int index = 0; index < at_rest_->sub_group().count; ++index) {
    const int rank = at_rest_->sub_group().rank(index);
    if (rank != memory_.rank()) readers.push_back(rank);
  }
  const auto first = std::ranges::find_if(model_.flats, [](const FlatLayout& flat) { return flat.trainable; });
  if (first == model_.flats.end() || readers.empty()) return;
  const int flat = static_cast<int>(first - model_.flats.begin());
  const auto has_read = [&](int rank) { return memory_.signals(rank).epoch(flat).load() >= epoch_; };
  if (std::ranges::all_of(readers, has_read)) return;
  std::vector<int> awaited;
  for (const int rank : readers) awaited.push_back(memory_.local_peers().index_of(rank));
  memory_.local_group().wait_until([&] { return std::ranges::all_of(readers, has_read); },
                                   {.what = "the ranks that read updated parameters", .ranks = awaited});
}

void ParameterStore::take_updates(int flat) {
  if (memory_.filed_parameters() == nullptr)
    return bring(flat, memory_.parameters(flat), *at_rest_, CallPurpose::kPublishParameters);
  const FlatLayout& layout = model_.flat(flat);
  const Range rest = memory_.rest_range(flat, memory_.rank());
  if (rest.size() == 0) return;
  // No unit is in use: the flat's slot has room for all of it, and the blocks are written whole.
  std::byte* const whole = memory_.gathered(flat) + array_bytes(rest.begin, layout.dtype);
  bring(flat, whole, *at_rest_, CallPurpose::kPublishParameters);
  gather_stream_.synchronize();
  memory_.keep_parameters(flat, rest.begin, {whole, array_bytes(rest.size(), layout.dtype)}, gather_stream_);
}

void ParameterStore::read(int flat, std::byte* out) {
  if (out == nullptr && !matched()) return;
  const std::size_t bytes = model_.flat(flat).bytes();
  const bool directly = out != nullptr && kernels_.on_host();
  const Scratch whole = directly ? Scratch{.bytes = {out, bytes}} : kernels_.make_scratch(bytes);
  bring(flat, whole.bytes.data(), *whole_, CallPurpose::kReadParameters);
  if (out != nullptr && !directly) {
    gather_stream_.enqueue([&] { kernels_.copy(out, whole.bytes.data(), bytes, gather_stream_); });
  }
  gather_stream_.synchronize();
}

std::size_t ParameterStore::transport_bytes() const {
  return whole_->transport_bytes() + at_rest_->transport_bytes();
}

int ParameterStore::num_blocks(int unit) const {
  int blocks = 0;
  for (const int flat : model_.unit_flats[static_cast<std::size_t>(unit)])
    blocks += memory_.filed_parameters()->num_blocks(flat);
  return blocks;
}

bool ParameterStore::fetch_blocks(int unit) {
  for (const int flat : model_.unit_flats[static_cast<std::size_t>(unit)]) {
    const Range rest = memory_.rest_range(flat, memory_.rank());
    for (std::int64_t at = rest.begin; at < rest.end; at = memory_.filed_parameters()->block_of(flat, at).end) {
      if (!memory_.filed_parameters()->prefetch(flat, at)) return false;
    }
  }
  return true;
}

void ParameterStore::fetch(int unit) {
  BlockedStates* const blocks = memory_.filed_parameters();
  if (blocks == nullptr) return;
  const std::uint64_t reads = blocks->store().counters().reads;
  const bool all = fetch_blocks(unit);
  if (!all || blocks->store().counters().reads > reads) ++counters_.demand_fetches;
  fetch_ahead(blocks->slots() - num_blocks(unit));
}

void ParameterStore::fetch_ahead(int room) {
  std::vector<bool> seen(model_.units.size(), false);
  for (std::size_t at = next_; at < last_order_.size() && room > 0; ++at) {
    const int unit = last_order_[at];
    if (seen[static_cast<std::size_t>(unit)] || units_[static_cast<std::size_t>(unit)].gathered) continue;
    seen[static_cast<std::size_t>(unit)] = true;
    room -= num_blocks(unit);
    if (room < 0 || !fetch_blocks(unit)) return;
  }
}

void ParameterStore::follow_order(int unit) {
  const auto begin = last_order_.begin();
  auto found = std::find(begin + static_cast<std::ptrdiff_t>(next_), last_order_.end(), unit);
  if (found == last_order_.end()) found = std::find(begin, last_order_.end(), unit);
  if (found != last_order_.end()) next_ = static_cast<std::size_t>(found - begin) + 1;
}

void ParameterStore::note_order(int unit) {
  if (memory_.filed_parameters() != nullptr) follow_order(unit);
  if (!order_known_) return;
  order_.push_back(unit);
  if (!last_order_.empty() && (order_.size() > last_order_.size() || last_order_[order_.size() - 1] != unit)) {
    ++counters_.order_deviations;
  }
}

void ParameterStore::prefetch_next() {
  for (int ahead = 0; ahead < plan_.prefetch_units; ++ahead) {
    const std::size_t next = order_.size() + static_cast<std::size_t>(ahead);
    if (next >= last_order_.size()) return;
    const int unit = last_order_[next];
    const auto slot = memory_.gathered_table().unit_slot[static_cast<std::size_t>(unit)];
    if (slot < 0 || units_[static_cast<std::size_t>(unit)].gathered) continue;
    const int user = slot_user_[static_cast<std::size_t>(slot)];
    if (user >= 0) continue;  // no room: it will be gathered on demand
    start_gather(unit);
  }
}

}  // namespace zeroth
