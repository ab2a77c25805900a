#include "engine/message_round.h"

#include "zero/spread_shards.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>

#include <algorithm>
#include <utility>

namespace zeroth {

MessageRound::MessageRound(const ModelLayout& layout, const Optimizer& optimizer, ModelMemory& memory,
                           GradientStore& gradients, const Communicator& communicator, Kernels& kernels, Stream stream,
                           const MakeReduction& make, const CompressionOptions& compression)
    : layout_(layout),
      optimizer_(optimizer),
      memory_(memory),
      gradients_(gradients),
      communicator_(kernels.on_host() ? communicator : Communicator(communicator.shared_backend(), stream)),
      kernels_(kernels),
      stream_(std::move(stream)),
      every_(std::max(1, compression.every)),
      rates_(layout.params.size(), 0.0),
      local_steps_(layout.params.size(), 0) {
  const bool adapts = compression.compression == "adaptive";
  if (adapts) choice_ = std::make_unique<LevelChoice>(layout_, kernels_, stream_);
  for (int flat = 0; flat < static_cast<int>(layout_.flats.size()); ++flat) {
    reductions_.emplace_back();
    if (!layout_.flat(flat).trainable || layout_.flat(flat).length == 0) continue;
    ReductionContext context{.model = layout_,
                             .flat = flat,
                             .communicator = communicator,
                             .kernels = kernels_,
                             .stream = stream_,
                             .options = compression};
    if (!adapts) reductions_.back().push_back(make(context));
    for (std::size_t level = 0; adapts && level < kCompressionLevels.size(); ++level) {
      context.options.compression = kCompressionLevels[level];
      reductions_.back().push_back(make(context));
    }
  }
}

MessageReduction* MessageRound::reduction_of(int flat) const {
  const auto index = static_cast<std::size_t>(flat);
  if (reductions_[index].empty()) return nullptr;
  return reductions_[index][choice_ ? static_cast<std::size_t>(choice_->levels()[index]) : 0].get();
}

void MessageRound::choose_levels() {
  if (!choice_ || (has_chosen_ && committed_ % every_ != 0)) return;
  has_chosen_ = true;
  std::vector<const std::byte*> momenta;
  for (int flat = 0; flat < static_cast<int>(layout_.flats.size()); ++flat)
    momenta.push_back(reduction_of(flat) == nullptr ? nullptr : place_of(flat, messages_->state));
  choice_->choose(momenta);
}

void MessageRound::set(std::int64_t committed) {
  committed_ = committed;
  messages_ = optimizer_.messages(committed);
  // Updates of gradients, and of messages that are none of it, change a rank's own part only.
  if (!messages_ || !messages_->reads_state) gathers_first_ = true;
  gradients_.keep_own(is_on());
}

std::byte* MessageRound::place_of(int flat, int state) const {
  const auto found = std::ranges::find_if(memory_.states(), [&](const ModelMemory::Placed& placed) {
    return placed.row.kind == StateKind::kOptimizer && placed.row.flat == flat && placed.row.which == state;
  });
  if (found == memory_.states().end() || found->row.range.size() == 0) return nullptr;  // an empty piece
  ZR_ASSERT(found->at.in_memory() != nullptr, "states of messages rest in memory");
  return found->at.in_memory();
}

void MessageRound::gather_states() {
  if (!messages_->reads_state || !std::exchange(gathers_first_, false) || memory_.degrees().optimizer == 1) return;
  for (int flat = 0; flat < static_cast<int>(layout_.flats.size()); ++flat) {
    if (reduction_of(flat) == nullptr) continue;
    const FlatLayout& layout = layout_.flat(flat);
    // Each owner's part.
    spread_shards(layout, communicator_, place_of(flat, messages_->state), size_of(layout.accumulation()));
  }
}

void MessageRound::zero_errors() {
  for (const ModelMemory::Placed& placed : memory_.states()) {
    const StateRow& row = placed.row;
    const bool is_error = row.which == messages_->worker_error || row.which == messages_->server_error;
    if (row.kind != StateKind::kOptimizer || !is_error || row.range.size() == 0) continue;
    kernels_.zero(placed.at.in_memory(), array_bytes(row.range.size(), row.dtype), stream_);
  }
}

MessageFactors MessageRound::factors_of(int param, bool has_grad, const UpdateTerms& terms, std::int64_t step) {
  const auto index = static_cast<std::size_t>(param);
  GroupHyper hyper = terms.groups[static_cast<std::size_t>(layout_.params[index].group)];
  hyper.lr *= terms.lr_factor;
  if (has_grad) rates_[index] += optimizer_.rate(hyper, step);
  MessageFactors factors =
      optimizer_.message_factors({.hyper = hyper, .committed = committed_, .step = step, .rates = rates_[index]});
  if (!has_grad) factors.momentum = factors.grad = 0.0;
  return factors;
}

void MessageRound::exchange(std::vector<bool>& has_grad, const UpdateTerms& terms,
                            std::span<const std::int64_t> updates) {
  ZR_FAILPOINT("engine.messages");
  gather_states();
  if (messages_->begins) zero_errors();
  if (!is_local()) choose_levels();
  for (int flat = 0; flat < static_cast<int>(layout_.flats.size()); ++flat) {
    MessageReduction* const reduction = reduction_of(flat);
    if (reduction == nullptr) continue;
    const FlatLayout& layout = layout_.flat(flat);
    std::byte* const sum = messages_->sum < 0 ? nullptr : place_of(flat, messages_->sum);
    std::vector<std::optional<MessageFactors>> factors;
    for (const Segment& segment : layout.segments) {
      factors.emplace_back();
      const auto param = static_cast<std::size_t>(segment.param);
      if (!has_grad[param] && (is_local() || local_steps_[param] == 0)) continue;
      // The reduction takes the mean over the ranks of what the update's factor makes a mean of.
      const double mean = terms.factor * layout.grad_factor * static_cast<double>(layout.world());
      MessageFactors own = factors_of(segment.param, has_grad[param], terms, updates[param] + 1);
      own.grad *= mean;
      factors.back() = own;
      has_grad[param] = true;
    }
    if (is_local() || std::ranges::none_of(factors, [](const auto& one) { return one.has_value(); })) continue;
    std::byte* const state = place_of(flat, messages_->state);
    reduction->reduce(
        {.momentum = state, .sum = sum, .grad = gradients_.own_gradients(flat), .grad_dtype = layout.accumulation()},
        factors, place_of(flat, messages_->worker_error), place_of(flat, messages_->server_error), state);
    for (std::size_t number = 0; sum != nullptr && number < factors.size(); ++number) {
      const Range range = layout.segments[number].range();
      if (factors[number])
        kernels_.zero(sum + array_bytes(range.begin, layout.accumulation()),
                      array_bytes(range.size(), layout.accumulation()), stream_);
    }
  }
}

void MessageRound::end_update(const std::vector<bool>& has_grad) {
  for (std::size_t param = 0; param < has_grad.size(); ++param) {
    if (!has_grad[param]) continue;
    if (!is_local()) rates_[param] = 0.0;
    local_steps_[param] = is_local() ? local_steps_[param] + 1 : 0;
  }
}

bool MessageRound::has_local_steps() const {
  return std::ranges::any_of(local_steps_, [](std::int64_t steps) { return steps > 0; });
}

MessageWire MessageRound::wire() const {
  MessageWire all;
  for (int flat = 0; !is_local() && flat < static_cast<int>(layout_.flats.size()); ++flat) {
    if (const MessageReduction* const reduction = reduction_of(flat)) all += reduction->wire();
  }
  return all;
}

}  // namespace zeroth
