#include "zero/gradient_store.h"

#include "zero/gradient_exchange.h"
#include "zero/signals.h"

#include <algorithm>
#include <utility>

namespace zeroth {
namespace {

/// The unit of each slot that only one unit uses, -1 for the others.
std::vector<int> sole_users(const SlotTable& table) {
  std::vector<int> users(table.slot_bytes.size(), -1);
  std::vector<bool> used(users.size(), false);
  for (std::size_t unit = 0; unit < table.unit_slot.size(); ++unit) {
    if (table.unit_slot[unit] < 0) continue;
    const auto slot = static_cast<std::size_t>(table.unit_slot[unit]);
    users[slot] = used[slot] ? -1 : static_cast<int>(unit);
    used[slot] = true;
  }
  return users;
}

}  // namespace

GradientStore::GradientStore(const ModelLayout& model, const ShardingPlan& plan, int micro_steps, ModelMemory& memory,
                             CommBackend& backend, Stream reduce_stream, Kernels& kernels, Kernels& host,
                             MemoryLedger& ledger)
    : model_(model),
      plan_(plan),
      micro_steps_(micro_steps),
      memory_(memory),
      reduce_stream_(std::move(reduce_stream)),
      kernels_(kernels),
      slot_holder_(sole_users(memory.bucket_table())),
      shards_(std::make_unique<ReducedShards>(model, memory, kernels, host, reduce_stream_, ledger,
                                              backend.node_sizes(), slot_holder_)),
      flats_(model.flats.size()),
      ring_positions_(ring_positions(model)),
      ring_open_(static_cast<std::size_t>(plan.ring_slots), -1),
      has_grad_(model.params.size(), false),
      nonfinite_(kernels.make_words((model.params.size() + 1) * sizeof(std::int64_t))),
      in_part_(model.units.size(), false),
      last_(model.units.size(), false) {
  const ExchangeContext context{model, memory, backend, reduce_stream_, ledger, *shards_, kernels, operations_};
  exchange_ = reads_peers() ? make_one_sided_exchange(context) : make_matched_exchange(context);
  for (std::size_t flat = 0; flat < model.flats.size(); ++flat) {
    flats_[flat].filled.assign(model.flats[flat].segments.size(), false);
    if (model.flats[flat].trainable && model.flats[flat].length > 0) trainable_flats_.push_back(static_cast<int>(flat));
  }
}

GradientStore::~GradientStore() = default;

bool GradientStore::has_sums(int flat) const {
  return shards_->has_sums(flat);
}
const kernels::NormAccumulator& GradientStore::norm(int flat) const {
  return shards_->norm(flat);
}
std::uint64_t GradientStore::spills() const {
  return exchange_->spills();
}
std::size_t GradientStore::transport_bytes() const {
  return exchange_->transport_bytes();
}
bool GradientStore::publishes_now(int unit) const {
  if (at_end_) return ending_;
  const bool often = plan_.policy == ReductionPolicy::kPerMicroStep || micro_steps_ == 1;
  if (!steered_) return often || micro_step_ == micro_steps_ - 1;
  return often ? in_part_[static_cast<std::size_t>(unit)] : last_[static_cast<std::size_t>(unit)];
}

void GradientStore::add(int param, ConstTensorView grad) {
  const ParamPlace& place = model_.places[static_cast<std::size_t>(param)];
  const FlatLayout& layout = model_.flat(place.flat);
  const Segment& segment = model_.segment(param);
  ZR_CHECK(!joined_, ErrorCode::kUsage, "a backward after the gradients of the step were read",
           {.where = "zero.reduce",
            .which = model_.params[static_cast<std::size_t>(param)].name,
            .expected = "no further backward before step(): the sums of all groups of ranks are formed",
            .hint = "read gradients after the last backward of the step, or use a plan without a degree of gradients"});
  has_grad_[static_cast<std::size_t>(param)] = true;
  if (segment.numel == 0) return;
  FlatState& flat = state(place.flat);
  ZR_CHECK(!flat.last, ErrorCode::kUsage, "a gradient after the last one of the step",
           {.where = "zero.reduce",
            .which = model_.params[static_cast<std::size_t>(param)].name,
            .expected = "one backward in the last micro-step of a step, and one gradient of each parameter in it",
            .got = "another one, when the unit's update may have begun",
            .hint = "zeroth.update.inside_backward = false and no delayed_after for several backwards a step"});
  if (!flat.open) open(place.flat);
  const bool first = !flat.filled[static_cast<std::size_t>(place.segment)];
  if (flat.dtype != layout.accumulation() && (!first || grad.dtype != flat.dtype)) {
    if (first_wide_ < 0) first_wide_ = param;
    widen(place.flat);
  }
  flat.filled[static_cast<std::size_t>(place.segment)] = true;
  const DType dtype = flat.dtype;
  std::byte* target = memory_.bucket(place.flat, dtype) + array_bytes(segment.offset, dtype);
  kernels_.store({target, dtype, grad.data, grad.dtype, segment.numel, !first}, nonfinite(param), reduce_stream_);
  arrived_.push_back(param);
  kernels_.settle(reduce_stream_);  // the caller may use its memory again
}

void GradientStore::leave_out() {
  for (std::size_t flat = 0; flat < flats_.size(); ++flat) {
    if (!flats_[flat].open) continue;
    const DType dtype = flats_[flat].dtype;
    const auto number = static_cast<int>(flat);
    kernels_.zero(memory_.bucket(number, dtype), array_bytes(model_.flat(number).length, dtype), reduce_stream_);
  }
  kernels_.settle(reduce_stream_);
  for (const int param : std::exchange(arrived_, {})) *nonfinite(param) = 0;
  offender_ = {};
}

void GradientStore::find_offender() {
  for (const int param : arrived_) {
    const std::int64_t found = std::exchange(*nonfinite(param), 0);
    if (found > 0 && offender_.param < 0) offender_ = {param, micro_step_, static_cast<std::uint64_t>(found)};
  }
  arrived_.clear();
}

void GradientStore::open(int flat) {
  const int unit = model_.flat(flat).unit;
  const auto unit_index = static_cast<std::size_t>(unit);
  if (ring_positions_[unit_index] >= 0 && !plan_.accumulates_in_buckets(micro_steps_)) {
    // The same rule under every plan, also where each unit has a bucket of its own: the list of events must not differ.
    int& holder = ring_open_[static_cast<std::size_t>(ring_positions_[unit_index] % plan_.ring_slots)];
    if (const int before = holder; before >= 0 && before != unit) {
      close_unit(before);
      ZR_CHECK(
          std::ranges::none_of(model_.unit_flats[static_cast<std::size_t>(before)],
                               [this](int one) { return state(one).open; }),
          ErrorCode::kModel,
          "gradients of a unit come in several backwards of a micro-step, and those of another one between them",
          {.where = "zero.reduce",
           .which = model_.units[static_cast<std::size_t>(before)].name + ", before " + model_.units[unit_index].name,
           .expected = "units that one chunk of a pipeline uses, where units share memory for gradients",
           .hint = "make it no unit: name the others in Engine(units=...)"});
    }
    holder = unit;
  }
  take_slot(unit);
  // What is summed, or may yet be summed, of earlier events must not meet the gradients of this one. Where the caller
  // says what backwards are of, ranks have no earlier event of a flat that this one has not.
  if (state(flat).published || (reduced_before_ && !steered_)) shards_->vacate(flat);
  state(flat).open = true;
  state(flat).dtype = memory_.bucket_dtype(flat);
}

void GradientStore::widen(int flat) {
  FlatState& own = state(flat);
  const FlatLayout& layout = model_.flat(flat);
  const DType wide = layout.accumulation();
  for (std::size_t segment = 0; segment < own.filled.size(); ++segment) {
    if (!own.filled[segment]) continue;
    const auto [_, offset, numel] = layout.segments[segment];
    const std::byte* from = memory_.bucket(flat, own.dtype) + array_bytes(offset, own.dtype);
    kernels_.store({memory_.bucket(flat, wide) + array_bytes(offset, wide), wide, from, own.dtype, numel, false},
                   nonfinite(static_cast<int>(model_.params.size())), reduce_stream_);
  }
  own.dtype = wide;
}

void GradientStore::take_slot(int unit) {
  const auto slot = static_cast<std::size_t>(memory_.bucket_table().unit_slot[static_cast<std::size_t>(unit)]);
  // A further event of the unit itself has to wait as well: its flats are closed one by one.
  const int holder = slot_holder_[slot] >= 0 ? slot_holder_[slot] : unit;
  exchange_->await_slot(holder, [this](int flat) { return state(flat).open; });
  if (holder != unit) {
    for (const int flat : model_.unit_flats[static_cast<std::size_t>(holder)]) {
      if (shards_->has_sums(flat)) shards_->vacate(flat);
    }
  }
  slot_holder_[slot] = unit;
}

void GradientStore::set_before_wait(std::function<void()> hook) {
  exchange_->set_before_wait(std::move(hook));
}

void GradientStore::close_unit(int unit, bool last) {
  if (!publishes_now(unit)) return;
  for (const int flat : model_.unit_flats[static_cast<std::size_t>(unit)]) {
    if (state(flat).open) publish(flat, last);
  }
  const int position = ring_positions_[static_cast<std::size_t>(unit)];
  if (position >= 0) {
    int& holder = ring_open_[static_cast<std::size_t>(position % plan_.ring_slots)];
    if (holder == unit) holder = -1;
  }
  exchange_->progress();
}

void GradientStore::begin_part(int micro_step) {
  set_micro_step(micro_step);
  in_part_.assign(in_part_.size(), false);
}

void GradientStore::add_to_part(int unit, bool last) {
  const auto index = static_cast<std::size_t>(unit);
  in_part_[index] = true;
  if (last) last_[index] = true;
}

void GradientStore::end_unit(int unit, const std::vector<bool>& expected) {
  if (!publishes_now(unit) || (steered_ && !in_part_[static_cast<std::size_t>(unit)])) return;
  for (const int flat : model_.unit_flats[static_cast<std::size_t>(unit)]) {
    const FlatLayout& layout = model_.flat(flat);
    const bool awaited = layout.trainable && layout.length > 0 && state(flat).published_in <= backward_ &&
                         std::ranges::any_of(layout.segments, [&](const Segment& segment) {
                           return expected[static_cast<std::size_t>(segment.param)];
                         });
    if (awaited && !state(flat).open) open(flat);
  }
  close_unit(unit);
}

void GradientStore::publish(int flat, bool last) {
  FlatState& own = state(flat);
  const FlatLayout& layout = model_.flat(flat);
  std::byte* const bucket = memory_.bucket(flat, own.dtype);
  // Zeros for what has no gradient and for padding: a shared slot may still hold another unit's gradients there.
  std::int64_t written_end = 0;
  const auto fill_until = [&](std::int64_t end) {
    if (end <= written_end) return;
    kernels_.zero(bucket + array_bytes(written_end, own.dtype), array_bytes(end - written_end, own.dtype),
                  reduce_stream_);
  };
  for (std::size_t segment = 0; segment < own.filled.size(); ++segment) {
    if (!own.filled[segment]) continue;
    fill_until(layout.segments[segment].offset);
    written_end = layout.segments[segment].offset + layout.segments[segment].numel;
  }
  fill_until(layout.length);
  own.filled.assign(own.filled.size(), false);
  own.open = false;
  own.published = true;
  own.published_in = backward_ + 1;
  own.last = last;
  if (keeps_own_) return;
  if (before_reduce_ && !reads_peers()) before_reduce_(flat);
  exchange_->publish(flat, own.dtype, last);
}

void GradientStore::take_part(int flat) {
  if (!state(flat).open) open(flat);
  publish(flat);
}

void GradientStore::close_backward() {
  for (const int flat : trainable_flats_) {
    if (!publishes_now(model_.flat(flat).unit)) continue;
    if (state(flat).open) publish(flat);
    reduced_before_ = true;
  }
  if (reduced_before_) std::ranges::fill(ring_open_, -1);
  exchange_->close_backward(++backward_);
}

void GradientStore::set_operations(OperationId step, OperationNames names) {
  step_ = step;
  operations_ = std::move(names);
}

void GradientStore::sync(OperationId what, std::string_view name) {
  if (model_.world > 1) exchange_->sync(what, name);
}

void GradientStore::complete() {
  if (joined_) return;
  const std::uint64_t next_step = step_after(backward_);
  ZR_CHECK(backward_ + 3 < next_step, ErrorCode::kUsage, "more than a million backwards in one step",
           {.where = "zero.reduce"});
  if (at_end_) {  // as one more backward, of a number that all ranks have
    backward_ = next_step - 2;
    exchange_->close_backward(backward_);
    ending_ = true;
    close_backward();
    ending_ = false;
  }
  backward_ = next_step;
  exchange_->close_backward(next_step);  // first: it tells the others what this rank has no gradients for
  sync(step_);
  exchange_->await_sums(next_step);
  for (const int flat : shards_->vacated()) {
    if (!shards_->has_slot(flat)) take_slot(model_.flat(flat).unit);  // others may still be reading a bucket there
  }
  shards_->settle();
  exchange_->combine_sums(next_step);
  joined_ = memory_.degrees().sums_groups();
  kernels_.settle(reduce_stream_);
  find_offender();
}

void GradientStore::complete_backwards(std::uint64_t backwards) {
  if (backward_ < backwards) exchange_->close_backward(backward_ = backwards);
  exchange_->await_sums(backwards);
  kernels_.settle(reduce_stream_);
}

std::byte* GradientStore::sums_so_far(int flat) {
  return shards_->has_sums(flat) ? shards_->sums_so_far(flat) : nullptr;
}

GradientStore::Waiting GradientStore::waiting(int param) {
  const ParamPlace& place = model_.places[static_cast<std::size_t>(param)];
  if (!model_.flat(place.flat).trainable || place.segment < 0) return {};
  const FlatState& flat = state(place.flat);
  if (!flat.open || !flat.filled[static_cast<std::size_t>(place.segment)]) return {};
  const std::int64_t offset = model_.segment(param).offset;
  return {.data = memory_.bucket(place.flat, flat.dtype) + array_bytes(offset, flat.dtype), .dtype = flat.dtype};
}

std::byte* GradientStore::restore_sums(int flat) {
  return shards_->sums_so_far(flat);
}

void GradientStore::restored(const std::vector<bool>& has_grad, const std::vector<int>& flats) {
  for (std::size_t param = 0; param < has_grad.size(); ++param) has_grad_[param] = has_grad_[param] || has_grad[param];
  for (const int flat : flats) {
    shards_->restored(flat);
    exchange_->restored(flat);
    state(flat).published = true;
  }
  reduced_before_ = plan_.policy == ReductionPolicy::kPerMicroStep;
  kernels_.settle(reduce_stream_);
}

bool GradientStore::are_final(int flat) {
  exchange_->progress();
  return !shards_->is_aside(flat) && exchange_->are_final(flat);
}

const std::byte* GradientStore::own_gradients(int flat) {
  if (!state(flat).published) {  // nothing of it has come on this rank
    if (!state(flat).open) open(flat);
    publish(flat);
  }
  ZR_ASSERT(state(flat).dtype == model_.flat(flat).accumulation(), "gradients for messages lie in buckets of sums");
  return memory_.bucket(flat, state(flat).dtype);
}

void GradientStore::add_own_norm(kernels::NormAccumulator& norm, double factor) {
  std::vector<PendingNorm> norms(trainable_flats_.size());
  for (std::size_t number = 0; number < trainable_flats_.size(); ++number) {
    const int flat = trainable_flats_[number];
    const FlatLayout& layout = model_.flat(flat);
    if (state(flat).published)
      kernels_.measure(own_gradients(flat), layout.accumulation(), layout.length, layout.grad_factor * factor,
                       norms[number], reduce_stream_);
  }
  kernels_.settle(reduce_stream_);
  for (std::size_t number = 0; number < trainable_flats_.size(); ++number) {
    if (state(trainable_flats_[number]).published) norm.merge(norms[number].value());
  }
}

void GradientStore::share_sums() {
  exchange_->share_sums();
}

void GradientStore::begin_step() {
  std::fill(has_grad_.begin(), has_grad_.end(), false);
  shards_->begin_step();
  exchange_->begin_step();
  for (FlatState& flat : flats_) {
    // Open still where a rank refuses the step before its last backward: what micro-steps left in the bucket goes with
    // the step.
    flat.published = flat.open = flat.last = false;
    flat.filled.assign(flat.filled.size(), false);
  }
  std::ranges::fill(ring_open_, -1);
  joined_ = false;
  reduced_before_ = false;
  last_.assign(last_.size(), false);
  find_offender();
  offender_ = {};
  micro_step_ = 0;
}

}  // namespace zeroth
