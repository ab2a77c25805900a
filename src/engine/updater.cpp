#include "engine/updater.h"

#include <zeroth/base/error.h>

#include <algorithm>
#include <utility>

namespace zeroth {
namespace {

bool has_shape(const Optimizer& optimizer, StateShape shape) {
  return std::ranges::any_of(optimizer.states(), [shape](const StateDeclaration& one) { return one.shape == shape; });
}

}  // namespace

Updater::Updater(const ModelLayout& layout, const Optimizer& optimizer, ModelMemory& memory, CommBackend& backend,
                 Kernels& kernels, Stream stream)
    : layout_(layout),
      optimizer_(optimizer),
      memory_(memory),
      backend_(backend),
      kernels_(kernels),
      stream_(std::move(stream)),
      num_states_(optimizer.states().size()),
      has_entries_of_tensors_(has_shape(optimizer, StateShape::kTensor) || has_shape(optimizer, StateShape::kRow)),
      has_entries_of_rows_(has_shape(optimizer, StateShape::kRow)),
      steps_(layout.params.size(), 0) {}

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
    const std::int64_t end = has_entries_of_tensors_ ? segment->range().end : padded;
    const Range part = intersect({segment->offset, end}, range);
    if (part.size() == 0) continue;
    const auto param = static_cast<std::size_t>(segment->param);
    if (!has_grad[param]) {
      joinable = false;
      continue;
    }
    const Run run{part, layout_.params[param].group, steps_[param] + 1};
    if (joinable && runs.back().group == run.group && runs.back().step == run.step) {
      runs.back().range.end = part.end;
    } else {
      runs.push_back(run);
    }
    joinable = !has_entries_of_tensors_;
  }
  return runs;
}

void Updater::update_run(int flat, const Run& run, double factor, const GroupHyper& hyper) {
  const FlatLayout& layout = layout_.flat(flat);
  const std::size_t element = size_of(layout.accumulation());
  for (int owner = 0; owner < layout.world(); ++owner) {
    const Range shard = layout.shard(owner);
    const Range part = intersect(run.range, shard);
    if (part.size() == 0) continue;
    const bool own = owner == memory_.rank();
    const std::byte* sums = own ? memory_.reduced(flat) : memory_.peer_reduced(flat, owner);
    update_range(flat, part, run.step, sums + static_cast<std::size_t>(part.begin - shard.begin) * element, factor,
                 hyper);
    if (!own && memory_.one_sided())
      backend_.count_one_sided(CollectiveKind::kAllGather, owner, static_cast<std::size_t>(part.size()) * element);
  }
}

void Updater::update_range(int flat, const Range& updated, std::int64_t step, const std::byte* grad, double factor,
                           const GroupHyper& hyper) {
  const FlatLayout& layout = layout_.flat(flat);
  const DType accumulation = layout.accumulation();
  const std::size_t element = size_of(accumulation);
  const std::int64_t in_states = updated.begin - memory_.update_range(flat).begin;
  const std::int64_t in_parameters = updated.begin - memory_.rest_range(flat, memory_.rank()).begin;
  std::int16_t* master_low = memory_.master_low(flat);
  float* master = memory_.master(flat);
  std::byte* resting = memory_.parameters(flat) + static_cast<std::size_t>(in_parameters) * size_of(layout.dtype);

  const auto at = [element](auto* base, std::int64_t index) {
    return base + static_cast<std::size_t>(index) * element;
  };
  const auto update = [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::byte*> states(num_states_);
    for (std::size_t state = 0; state < num_states_; ++state) {
      states[state] = memory_.state(flat, static_cast<int>(state), updated.begin + begin);
    }
    optimizer_.step({.param = resting + static_cast<std::size_t>(begin) * size_of(layout.dtype),
                     .low = master_low != nullptr ? master_low + in_states + begin : nullptr,
                     .master = master != nullptr ? master + in_states + begin : nullptr,
                     .states = states,
                     .grad = at(grad, begin),
                     .n = end - begin,
                     .dtype = accumulation,
                     .factor = factor * layout.grad_factor,
                     .step = step,
                     .hyper = hyper},
                    kernels_, stream_);
  };
  if (!has_entries_of_tensors_) return kernels_.for_ranges(updated.size(), update);
  for (const Range& block : blocks_of(flat, updated)) update(block.begin - updated.begin, block.end - updated.begin);
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

void Updater::update(const std::vector<bool>& has_grad, double factor, const std::vector<GroupHyper>& groups,
                     double lr_factor) {
  for (std::size_t flat = 0; flat < layout_.flats.size(); ++flat) {
    if (!layout_.flats[flat].trainable) continue;
    for (const Run& run : runs_of(static_cast<int>(flat), has_grad)) {
      GroupHyper hyper = groups[static_cast<std::size_t>(run.group)];
      hyper.lr *= lr_factor;
      update_run(static_cast<int>(flat), run, factor, hyper);
    }
  }
  for (std::size_t param = 0; param < has_grad.size(); ++param) {
    if (has_grad[param]) ++steps_[param];
  }
}

}  // namespace zeroth
