#include "zero/model_memory.h"

#include "zero/coded_calls.h"
#include "zero/signals.h"

#include <zeroth/base/error.h>

#include <algorithm>
#include <functional>
#include <utility>

namespace zeroth {
namespace {

/// What lies between two elements, from `first` on.
std::size_t distance(std::int64_t first, std::int64_t element, DType dtype) {
  return array_bytes(element - first, dtype);
}

}  // namespace

SharedLayout make_shared_layout(const ModelLayout& model, const ShardingPlan& plan, int rank, int micro_steps) {
  SharedLayout layout;
  std::size_t offset = 0;
  const auto take = [&offset](std::size_t bytes) {
    const std::size_t begin = offset;
    offset += bytes;
    return begin;
  };
  layout.parameters.assign(model.flats.size(), SharedLayout::kNone);
  layout.reduced.assign(model.flats.size(), SharedLayout::kNone);
  for (const StateRow& row : state_table(model, plan, rank, {}, micro_steps)) {  // no state of an optimizer is shared
    if (!row.shared) continue;
    std::vector<std::size_t>& offsets = row.kind == StateKind::kParameter ? layout.parameters : layout.reduced;
    offsets[static_cast<std::size_t>(row.flat)] = take(row.bytes());
  }
  for (const std::size_t bytes : bucket_slots(model, plan, micro_steps).slot_bytes) {
    layout.bucket_slots.push_back(take(bytes));
  }
  layout.bytes = offset;
  return layout;
}

ModelMemory::ModelMemory(const ModelLayout& model, const ShardingPlan& plan, std::span<const StateDeclaration> states,
                         int micro_steps, Device& device, Kernels& kernels, CommBackend& backend,
                         const StateFiles& files)
    : model_(model),
      plan_(plan),
      degrees_(plan.degrees(model.world)),
      rank_(backend.rank()),
      choice_(choose_exchange(backend.capabilities(), kernels.memory(), plan.codes.any())),
      one_sided_(choice_.one_sided),
      local_group_(&backend),
      local_peers_{.first = one_sided_ ? 0 : rank_, .count = one_sided_ ? model.world : 1},
      bucket_dtypes_(bucket_dtypes(model, plan, micro_steps)),
      sums_in_buckets_(sums_in_buckets(model, plan, micro_steps)),
      // Without sub-groups nobody sums the next gradients before all ranks have given theirs, and then they have
      // taken the last sums.
      peers_read_sums_(one_sided_ && plan.gathers_gradients(model.world) &&
                       (degrees_.sums_groups() || std::ranges::any_of(sums_in_buckets_, std::identity{}))),
      bucket_table_(bucket_slots(model, plan, micro_steps)),
      wide_table_(wide_slots(model, plan, micro_steps)),
      gathered_table_(gathered_slots(model, plan)),
      bucket_holds_(bucket_table_.slot_bytes.size()),
      wide_holds_(wide_table_.slot_bytes.size()),
      ledger_(device.ledger()) {
  for (int rank = 0; rank < model.world; ++rank) {
    shared_layouts_.push_back(make_shared_layout(model, plan, rank, micro_steps));
  }
  if (!one_sided_) find_neighbours(backend);
  const SharedLayout& own = shared_layouts_[static_cast<std::size_t>(rank_)];
  signal_words_ = device.make_arena(local_group_->capabilities().window_kind, control_bytes(model), "signals");
  holds_.push_back(ledger_.hold({-1, MemoryState::kControl}, control_bytes(model)));
  shared_ = make_window(device, kernels, own.bytes, "shared");
  place_states(kernels, states, micro_steps, shared_.reserve(own.bytes), device, files);
  const SignalLayout signals(static_cast<int>(model.flats.size()), model.world);
  signal_window_ = window_of(signal_words_, "zero.signals");
  window_ = window_of(shared_, "zero");
  if (wide_table_.total_bytes() > 0) {
    wide_ = make_window(device, kernels, wide_table_.total_bytes(), "wide");
    wide_window_ = window_of(wide_, "zero.wide");
  }
  for (int index = 0; index < local_peers_.count; ++index) {
    const auto peer = static_cast<std::size_t>(local_peers_.rank(index));
    signals_.emplace_back(signal_window_.ranks[peer].first(control_bytes(model)), signals);
  }
}

ModelMemory::~ModelMemory() = default;

Arena ModelMemory::make_window(Device& device, Kernels& kernels, std::size_t bytes, std::string_view name) const {
  const ArenaKind kind = choose_exchange(local_group_->capabilities(), kernels.memory()).window;
  return kind == kernels.memory() ? kernels.make_arena(bytes, name) : device.make_arena(kind, bytes, name);
}

PeerWindow ModelMemory::window_of(const Arena& arena, std::string_view name) const {
  if (one_sided_) return local_group_->attach(arena, name);
  PeerWindow window;
  std::vector<std::span<std::byte>> reached{{arena.data(), arena.capacity()}};
  if (node_group_) {
    PeerWindow attached = local_group_->attach(arena, name);
    reached = std::move(attached.ranks);
    window.keep = std::move(attached.keep);
  }
  window.ranks.resize(static_cast<std::size_t>(model_.world));
  for (int index = 0; index < local_peers_.count; ++index) {
    window.ranks[static_cast<std::size_t>(local_peers_.rank(index))] = reached[static_cast<std::size_t>(index)];
  }
  return window;
}

void ModelMemory::place_states(Kernels& kernels, std::span<const StateDeclaration> states, int micro_steps,
                               std::span<std::byte> shared, Device& device, const StateFiles& files) {
  const SharedLayout& own = shared_layouts_[static_cast<std::size_t>(rank_)];
  std::vector<StateRow> rows = state_table(model_, plan_, rank_, states, micro_steps);
  std::size_t bytes = gathered_table_.total_bytes();
  std::size_t beside = 0;
  const auto is_beside = [this](const StateRow& row) {
    return plan_.residency.beside_device && row.residency == Residency::kHost;
  };
  for (const StateRow& row : rows) {
    if (!row.shared && !row.in_blocks) (is_beside(row) ? beside : bytes) += row.bytes();
  }
  for (const BlockSet set : kBlockSets) {
    const bool any = std::ranges::any_of(
        rows, [set](const StateRow& row) { return row.in_blocks && block_set_of(row.kind) == set; });
    if (!any) continue;
    (set == BlockSet::kUpdates ? blocked_ : filed_parameters_) =
        std::make_unique<BlockedStates>(model_, rows, set, plan_.residency, files, rank_, device, kernels);
  }
  if (const std::size_t slot = bus_slot_bytes(model_, plan_, rank_); slot > 0)
    bus_ = std::make_unique<DeviceBus>(device, kernels, slot, bus_device_bytes(model_, plan_, rank_),
                                       plan_.residency.slots);
  private_ = kernels.make_arena(bytes, "private");
  host_ = device.make_arena(ArenaKind::kPrivate, beside, "host states");
  parameters_.assign(model_.flats.size(), StateBytes());
  reduced_.assign(model_.flats.size(), nullptr);
  held_.assign(model_.flats.size(), nullptr);
  reduction_errors_.assign(model_.flats.size(), nullptr);
  masters_.assign(model_.flats.size(), -1);
  first_state_.assign(model_.flats.size(), 0);
  for (StateRow& row : rows) {
    const std::size_t flat = index(row.flat);
    if (row.kind == StateKind::kMaster) masters_[flat] = static_cast<int>(states_.size());
    if (row.kind == StateKind::kOptimizer && row.which == 0) first_state_[flat] = states_.size();
    if (row.in_blocks) {
      BlockedStates& blocks = block_set_of(row.kind) == BlockSet::kUpdates ? *blocked_ : *filed_parameters_;
      const StateBytes first(blocks, row.flat, blocks.row_of(row.flat, row.kind, row.which), row.range.begin);
      if (row.kind == StateKind::kParameter) parameters_[flat] = first;
      states_.push_back({std::move(row), first});
      continue;
    }
    std::byte* data = nullptr;
    if (row.shared) {
      data = shared.data() + (row.kind == StateKind::kParameter ? own.parameters[flat] : own.reduced[flat]);
    } else {
      data = (is_beside(row) ? host_ : private_).reserve(row.bytes(), kSegmentAlignBytes).data();
    }
    holds_.push_back(ledger_.hold({row.unit, row.memory()}, row.bytes()));
    if (row.kind == StateKind::kParameter) parameters_[flat] = StateBytes(data);
    if (row.kind == StateKind::kSums) reduced_[flat] = data;
    if (row.kind == StateKind::kHeld) held_[flat] = data;
    if (row.kind == StateKind::kOptimizer && row.name == kReductionError && row.dtype == DType::kFloat32)
      reduction_errors_[flat] = reinterpret_cast<float*>(data);
    if (row.initial != 0) kernels.fill(data, row.entries, row.dtype, row.initial);
    states_.push_back({std::move(row), StateBytes(data)});
  }
  for (const std::size_t slot_bytes : gathered_table_.slot_bytes) {
    gathered_slots_.push_back(private_.reserve(slot_bytes, kSegmentAlignBytes));
  }
  gathered_holds_.resize(gathered_slots_.size());
}

void ModelMemory::add_state(Kernels& kernels, StateKind kind, const std::string& name) {
  std::vector<StateRow> rows;
  std::size_t bytes = 0;
  for (std::size_t flat = 0; flat < model_.flats.size(); ++flat) {
    const FlatLayout& layout = model_.flats[flat];
    if (!layout.trainable) continue;
    const Range range = update_range(static_cast<int>(flat));
    rows.push_back({.kind = kind,
                    .name = name,
                    .flat = static_cast<int>(flat),
                    .unit = layout.unit,
                    .range = range,
                    .degree = degrees_.optimizer,
                    .entries = range.size(),
                    .dtype = layout.accumulation()});
    bytes += rows.back().bytes();
  }
  Arena arena = kernels.make_arena(bytes, name);
  for (StateRow& row : rows) {
    std::byte* const data = arena.reserve(row.bytes(), kSegmentAlignBytes).data();
    holds_.push_back(ledger_.hold({row.unit, row.memory()}, row.bytes()));
    states_.push_back({std::move(row), StateBytes(data)});
  }
  added_.push_back(std::move(arena));
}

std::size_t ModelMemory::added_bytes() const {
  std::size_t bytes = 0;
  for (const Placed& state : states_) {
    const bool added = state.row.kind == StateKind::kAverage || state.row.kind == StateKind::kOuter;
    bytes += added ? state.row.bytes() : 0;
  }
  return bytes;
}

std::uint64_t ModelMemory::added_resident_bytes() const {
  std::uint64_t bytes = 0;
  for (const Arena& arena : added_) bytes += arena.resident_bytes();
  return bytes;
}

// Nodes of equally many ranks, and states or sums that are split inside them.
void ModelMemory::find_neighbours(CommBackend& backend) {
  const std::span<const int> nodes = backend.node_sizes();
  const int per_node = nodes.front();
  const auto inside = [per_node](int degree) { return degree > 1 && per_node % degree == 0; };
  if (!choice_.one_sided_on_nodes || !(inside(degrees_.parameter) || inside(degrees_.gradient))) return;
  if (std::ranges::any_of(nodes, [per_node](int size) { return size != per_node; })) return;
  const int node = rank_ / per_node;
  node_group_ = backend.split(node, rank_, "node");
  ZR_ASSERT(node_group_->capabilities().one_sided && node_group_->size() == per_node,
            "a node is no group of ranks that read each other's memory");
  local_group_ = node_group_.get();
  local_peers_ = {.first = node * per_node, .count = per_node};
}

const std::byte* ModelMemory::peer_parameters(int flat, int rank, std::int64_t element) const {
  const auto peer = static_cast<std::size_t>(rank);
  const std::byte* base = window_.ranks[peer].data() + shared_layouts_[peer].parameters[index(flat)];
  return base + distance(rest_range(flat, rank).begin, element, model_.flat(flat).dtype);
}

Range ModelMemory::together(int flat, std::int64_t element) const {
  Range range = update_range(flat);
  for (const auto* blocks : {blocked_.get(), filed_parameters_.get()}) {
    if (blocks != nullptr && blocks->has(flat)) range = intersect(range, blocks->block_of(flat, element));
  }
  if (bus_ != nullptr) {
    const std::int64_t block = plan_.residency.block_elements;
    const std::int64_t begin = update_range(flat).begin;
    const std::int64_t first = begin + (element - begin) / block * block;
    range = intersect(range, {first, first + block});
  }
  return range;
}

int ModelMemory::views_ahead() const {
  constexpr int kMost = 64;  // more than a disk has in flight
  int ahead = 0;
  for (const auto* blocks : {blocked_.get(), filed_parameters_.get()}) {
    if (blocks == nullptr || !blocks->has_files()) continue;
    const int most = std::clamp(blocks->slots() - 2, 1, kMost);
    ahead = ahead == 0 ? most : std::min(ahead, most);
  }
  return ahead;
}

StateView ModelMemory::view(int flat, std::int64_t element, Access access) {
  StateView view;
  view.memory_ = this;
  view.flat_ = flat;
  if (blocked_ && blocked_->has(flat)) view.lease_ = blocked_->lease(flat, element, access);
  if (filed_parameters_) view.parameters_ = filed_parameters_->lease(flat, element, access);
  return view;
}

bool ModelMemory::prefetch_states(int flat, std::int64_t element) {
  bool any = false;
  for (auto* blocks : {blocked_.get(), filed_parameters_.get()}) {
    if (blocks == nullptr || !blocks->has(flat) || !blocks->in_files(flat, element)) continue;
    any = true;
    blocks->prefetch(flat, element);
  }
  return any;
}

StateBytes ModelMemory::parameters_from(int flat, std::int64_t element) const {
  return parameters_at_rest(flat).after(element - rest_range(flat, rank_).begin, model_.flat(flat).dtype);
}

template <class Body>
void ModelMemory::for_slots(int flat, std::int64_t element, std::size_t bytes, const Body& body) {
  for (std::size_t done = 0; done < bytes;) {
    const std::int64_t end = filed_parameters_->block_of(flat, element).end;
    const std::size_t part = std::min(bytes - done, array_bytes(end - element, model_.flat(flat).dtype));
    BusSlot slot = bus_->take();
    body(slot, parameters_from(flat, element), done, part);
    done += part;
    element = end;
  }
}

void ModelMemory::bring_parameters(int flat, std::int64_t element, std::span<std::byte> to, const Stream& stream) {
  if (bus_ == nullptr) return parameters_from(flat, element).read(to);
  for_slots(flat, element, to.size(), [&](BusSlot& slot, const StateBytes& at, std::size_t done, std::size_t bytes) {
    at.read(slot.bytes().first(bytes));
    slot.send(0, to.data() + done, bytes, stream);
  });
}

void ModelMemory::keep_parameters(int flat, std::int64_t element, std::span<const std::byte> from,
                                  const Stream& stream) {
  if (bus_ == nullptr) return parameters_from(flat, element).write(from);
  bus_->down().order_after(stream.record());
  for_slots(flat, element, from.size(), [&](BusSlot& slot, const StateBytes& at, std::size_t done, std::size_t bytes) {
    slot.fetch(0, from.data() + done, bytes);
    slot.wait();
    at.write(slot.bytes().first(bytes));
  });
}

StateBytes ModelMemory::masters(int flat) const {
  const int number = masters_[index(flat)];
  return number < 0 ? StateBytes() : states_[index(number)].at;
}

std::byte* StateView::state(int which, std::int64_t element) const {
  const ModelMemory::Placed& placed = memory_->state_row(flat_, which);
  if (placed.row.in_blocks) return lease_.at(memory_->blocked_->row_of(flat_, StateKind::kOptimizer, which), element);
  const bool is_piece = placed.row.shape == StateShape::kPiece;
  if (is_piece && (element < placed.row.range.begin || element >= placed.row.range.end)) return nullptr;
  return placed.at.in_memory() + array_bytes(entry_of(memory_->model_, placed.row, element), placed.row.dtype);
}

std::byte* StateView::master_at(Master kind, std::int64_t element) const {
  const int number = memory_->masters_[static_cast<std::size_t>(flat_)];
  if (number < 0 || !memory_->has_master(flat_, kind)) return nullptr;
  const auto& [row, at] = memory_->states_[static_cast<std::size_t>(number)];
  if (row.in_blocks) return lease_.at(memory_->blocked_->row_of(flat_, StateKind::kMaster, 0), element);
  return at.in_memory() + array_bytes(element - row.range.begin, row.dtype);
}

std::int16_t* StateView::master_low(std::int64_t element) const {
  return reinterpret_cast<std::int16_t*>(master_at(Master::kLowerHalf, element));
}

float* StateView::master(std::int64_t element) const {
  return reinterpret_cast<float*>(master_at(Master::kWhole, element));
}

std::byte* StateView::parameter(std::int64_t element) const {
  if (memory_->filed_parameters_) return parameters_.at(0, element);
  return memory_->parameters(flat_) +
         distance(memory_->rest_range(flat_, memory_->rank_).begin, element, memory_->model_.flat(flat_).dtype);
}

std::byte* ModelMemory::sums_at(int flat, std::int64_t element) {
  const DType accumulation = model_.flat(flat).accumulation();
  if (sums_in_bucket(flat)) return bucket(flat, accumulation) + array_bytes(element, accumulation);
  return reduced_[index(flat)] + distance(sums_range(flat, rank_).begin, element, accumulation);
}

std::byte* ModelMemory::gathered_sums(int flat) {
  const FlatLayout& layout = model_.flat(flat);
  const std::int64_t begin = layout.part(rank_, degrees_.sums).begin;
  if (!plan_.gathers_into_buckets()) return sums_at(flat, begin);
  return bucket(flat, layout.accumulation()) + array_bytes(begin, layout.accumulation());
}

const std::byte* ModelMemory::peer_reduced(int flat, int rank) {
  const FlatLayout& layout = model_.flat(flat);
  const std::int64_t begin = layout.shard(rank).begin;
  if (one_sided_) return peer_sums(flat, rank, begin);
  return gathered_sums(flat) + distance(layout.part(rank_, degrees_.sums).begin, begin, layout.accumulation());
}

const std::byte* ModelMemory::peer_sums(int flat, int rank, std::int64_t element) const {
  const DType accumulation = model_.flat(flat).accumulation();
  if (sums_in_bucket(flat)) return peer_bucket(flat, rank, accumulation) + array_bytes(element, accumulation);
  const auto peer = static_cast<std::size_t>(rank);
  return window_.ranks[peer].data() + shared_layouts_[peer].reduced[index(flat)] +
         distance(sums_range(flat, rank).begin, element, accumulation);
}

std::byte* ModelMemory::bucket(int flat, DType dtype) {
  const int unit = model_.flat(flat).unit;
  const bool planned = dtype == bucket_dtype(flat);
  const SlotTable& table = planned ? bucket_table_ : wide_table_;
  const auto slot = static_cast<std::size_t>(table.unit_slot[static_cast<std::size_t>(unit)]);
  MemoryHold& hold = (planned ? bucket_holds_ : wide_holds_)[slot];
  if (hold.bytes() == 0) {
    hold = ledger_.hold({unit, planned ? MemoryState::kBucket : MemoryState::kOverflow}, table.slot_bytes[slot]);
  }
  return const_cast<std::byte*>(peer_bucket(flat, rank_, dtype));
}

const std::byte* ModelMemory::peer_bucket(int flat, int rank, DType dtype) const {
  const auto peer = static_cast<std::size_t>(rank);
  const int unit = model_.flat(flat).unit;
  if (dtype != bucket_dtype(flat)) {
    return wide_window_.ranks[peer].data() + wide_table_.slot_offset(unit) + wide_table_.flat_offset[index(flat)];
  }
  const auto slot = static_cast<std::size_t>(bucket_table_.unit_slot[static_cast<std::size_t>(unit)]);
  return window_.ranks[peer].data() + shared_layouts_[peer].bucket_slots[slot] + bucket_table_.flat_offset[index(flat)];
}

std::byte* ModelMemory::gathered(int flat) {
  const int unit = model_.flat(flat).unit;
  const int index_of_slot = gathered_table_.unit_slot[static_cast<std::size_t>(unit)];
  // Nothing but empty parameters: any address will do, and it is never followed.
  if (index_of_slot < 0) return shared_.data();
  const auto slot = static_cast<std::size_t>(index_of_slot);
  if (gathered_holds_[slot].bytes() == 0) {
    gathered_holds_[slot] = ledger_.hold({unit, MemoryState::kGathered}, gathered_table_.slot_bytes[slot]);
  }
  return gathered_slots_[slot].data() + gathered_table_.flat_offset[index(flat)];
}

const Signals& ModelMemory::signals(int rank) const {
  const int index = local_peers_.index_of(rank);
  ZR_ASSERT(index >= 0, "signals of a peer that is no local peer");
  return signals_[static_cast<std::size_t>(index)];
}

Range ModelMemory::update_range(int flat) const {
  return model_.flat(flat).part(rank_, degrees_.optimizer);
}

Range ModelMemory::rest_range(int flat, int rank) const {
  return model_.flat(flat).part(rank, degrees_.parameter);
}

}  // namespace zeroth
