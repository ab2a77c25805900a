#include "libtorch/pipeline/shared_head.h"

#include "libtorch/parallel/group_call.h"
#include "libtorch/pipeline/part_scope.h"
#include "libtorch/pipeline/stage_values.h"

#include <zeroth/base/error.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

namespace zeroth::libtorch {
namespace {

constexpr const char* kHeadWhere = "libtorch.pipeline";
constexpr CallName kCallScores{.call = "scores of a shared head", .number = 15};
constexpr CallName kCallGradient{.call = "gradient of a shared head's input", .number = 16};
constexpr CallName kCallLogits{.call = "logits of a shared head", .number = 17};

at::Tensor as_wide(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}

Parcel parcel_of(ActionKind kind, int micro_batch) {
  return {.chunk = -1, .micro_batch = micro_batch, .told_by = kind};
}

SentValues sent(std::vector<at::Tensor> tensors) {
  SentValues values{.tensors = std::move(tensors)};
  values.has_gradient.assign(values.tensors.size(), false);
  return values;
}

/// Of parts [3, N] of a vocabulary: the maximum of each token, the sum of exponentials, the logit of the target.
at::Tensor merged(const std::vector<at::Tensor>& parts) {
  at::Tensor most = parts[0][0];
  for (const at::Tensor& one : parts) most = most.maximum(one[0]);
  at::Tensor sum = at::zeros_like(most);
  at::Tensor chosen = at::zeros_like(most);
  for (const at::Tensor& one : parts) {
    sum += (one[0] - most).exp_().mul_(one[1]);
    chosen += one[2];
  }
  return at::stack({most, sum, chosen});
}

std::string shown(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.toString() + " " + c10::str(tensor.sizes()) : "no tensor";
}

}  // namespace

struct SharedHeadRun::State {
  at::Tensor hidden{};   ///< [N, features], of tokens that count
  at::Tensor targets{};  ///< [N]
  double factor = 0.0;   ///< of the sum of the cross entropies
  double constant = 0.0;
  double parts = 1.0;   ///< of the loss, of which this pipeline has one
  at::Tensor whole{};   ///< on the last chunk's stage: the layer's input as the chunk returned it, without memory
  at::Tensor rows{};    ///< there: where the tokens are
  at::Tensor logits{};  ///< [N, own rows]
  at::Tensor local_targets{};  ///< [N], 0 where it is not here
  at::Tensor is_own{};         ///< [N] bool
  at::Tensor scores{};         ///< [3, N]: maximum, sum of exponentials, logit of the target
  at::Tensor soft{};           ///< one barrier: [N, features], softmax over the own rows times the rows
  at::Tensor target_rows{};    ///< one barrier: the rows of targets that are here
  ChunkGraph graph{};
  bool combined = false;
  bool is_half_done = false;  ///< on the last chunk's stage, one barrier: V_T, or the backward of the last chunk
  at::Tensor log_sum{};       ///< [N], over all rows
  at::Tensor gradient{};      ///< [N, features]: the own part, or on the last chunk's stage with one barrier the sum

  void take_numbers(const at::Tensor& numbers) {
    factor = numbers[0].item<double>();
    constant = numbers[1].item<double>();
    parts = numbers[2].item<double>();
  }
};

SharedHeadRun::SharedHeadRun(std::shared_ptr<Runtime> runtime, StageLinks& links, SharedHead head,
                             const StepProgram& program, int stage)
    : runtime_(std::move(runtime)),
      links_(links),
      head_(std::move(head)),
      stage_(stage),
      stages_(program.ranks()),
      root_(program.rank_of_chunk.back()) {
  const auto own = static_cast<std::size_t>(stage);
  const int ranks = stages_ * (head_.beside ? head_.beside->size() : 1);
  const bool fits = head_.rows.size() == static_cast<std::size_t>(ranks) && head_.weight.defined() &&
                    std::ranges::all_of(head_.rows, [](std::int64_t rows) { return rows > 0; });
  ZR_CHECK(fits, ErrorCode::kUsage, "a head does not fit the stages",
           {.where = kHeadWhere,
            .which = "the rows of each rank",
            .expected = std::to_string(ranks) + " numbers, none 0",
            .got = c10::str(head_.rows)});
  vocabulary_ = std::accumulate(head_.rows.begin(), head_.rows.end(), std::int64_t{0});
  const auto& actions = program.actions[own];
  two_barriers_ =
      std::ranges::any_of(actions, [](const Action& one) { return one.kind == ActionKind::kVocabInputGradient; });
  keeps_gathered_ = runtime_->core().settings().plan.reshard == Reshard::kStep;
  for (const Action& one : actions) {
    if (one.kind == ActionKind::kVocabGradients) last_micro_batch_ = one.micro_batch;
  }
}

SharedHeadRun::~SharedHeadRun() = default;

std::size_t SharedHeadRun::number_of(int stage) const {
  return static_cast<std::size_t>(head_.beside ? stage * head_.beside->size() + head_.beside->rank() : stage);
}

std::int64_t SharedHeadRun::begin_of(int stage) const {
  const auto own = head_.rows.begin() + static_cast<std::ptrdiff_t>(number_of(stage));
  return std::accumulate(head_.rows.begin(), own, std::int64_t{0});
}

void SharedHeadRun::begin(bool trains) {
  forget();
  trains_ = trains;
  losses_ = 0.0;
}

void SharedHeadRun::forget() noexcept {
  states_.clear();
  gathered_ = false;
}

SharedHeadRun::State& SharedHeadRun::state_of(int micro_batch) {
  std::unique_ptr<State>& state = states_[micro_batch];
  if (!state) state = std::make_unique<State>();
  return *state;
}

at::Tensor SharedHeadRun::take_output(const std::vector<at::Tensor>& outputs, const Action& action) {
  const bool fits = outputs.size() == 4 &&
                    std::ranges::all_of(outputs, [](const at::Tensor& one) { return one.defined(); }) &&
                    outputs[0].is_floating_point() && outputs[0].dim() >= 1 && outputs[1].scalar_type() == at::kLong &&
                    outputs[2].scalar_type() == at::kLong && outputs[1].sizes() == outputs[2].sizes() &&
                    outputs[1].dim() == 1 && outputs[3].scalar_type() == at::kDouble && outputs[3].numel() == 3;
  ZR_CHECK(fits, ErrorCode::kModel, "the last chunk of a pipeline gives no input of the shared head",
           {.where = kHeadWhere,
            .which = to_text(action),
            .expected = "the input, rows, targets and three numbers; see SharedHead",
            .got = outputs.empty() ? "no tensor" : shown(outputs[0])});
  const at::NoGradGuard no_grad;
  State& state = state_of(action.micro_batch);
  const at::Tensor& targets = outputs[2];
  const at::Tensor strange = targets.lt(0).logical_or_(targets.ge(vocabulary_));
  ZR_CHECK(!strange.any().item<bool>(), ErrorCode::kUsage, "a target is outside the vocabulary",
           {.where = kHeadWhere,
            .which = to_text(action),
            .expected = "0 to " + std::to_string(vocabulary_ - 1),
            .got = std::to_string(targets.masked_select(strange)[0].item<std::int64_t>()),
            .hint = "give targets that do not count the value of ignore_index"});
  const at::Tensor flat = outputs[0].detach().reshape({-1, outputs[0].size(-1)});
  state.rows = outputs[1];
  state.hidden = flat.index_select(0, state.rows);
  state.targets = targets;
  state.take_numbers(outputs[3]);
  state.whole = at::zeros({}, flat.options()).expand(outputs[0].sizes());
  return outputs[0];
}

void SharedHeadRun::run(const Action& action, const zeroth::Engine::BackwardPart& part) {
  switch (action.kind) {
    case ActionKind::kVocabInput:
      return send_input(action.micro_batch);
    case ActionKind::kVocabScores:
      return compute_scores(action.micro_batch);
    case ActionKind::kVocabSum:
      return send_scores(action.micro_batch);
    case ActionKind::kVocabGradients:
      return compute_gradients(action.micro_batch, part);
    case ActionKind::kVocabInputGradient:
      return send_gradient(action.micro_batch);
    default:
      break;
  }
  throw Error(ErrorCode::kInternal, "this is no action of a head", {.where = kHeadWhere, .which = to_text(action)});
}

void SharedHeadRun::send_input(int micro_batch) {
  if (!is_root()) return;
  const State& state = state_of(micro_batch);
  at::Tensor numbers = at::zeros({3}, at::kDouble);
  numbers[0] = state.factor;
  numbers[1] = state.constant;
  numbers[2] = state.parts;
  for (int to = 0; to < stages_; ++to) {
    if (to != stage_)
      links_.send(to, parcel_of(ActionKind::kVocabInput, micro_batch), sent({state.hidden, state.targets, numbers}));
  }
}

void SharedHeadRun::compute_scores(int micro_batch) {
  State& state = state_of(micro_batch);
  if (!is_root()) {
    const SentValues given = links_.receive(root_, parcel_of(ActionKind::kVocabInput, micro_batch));
    state.hidden = given.tensors.at(0);
    state.targets = given.tensors.at(1);
    state.take_numbers(given.tensors.at(2));
  }
  const at::Tensor hidden = state.hidden.detach();
  if (trains_ && two_barriers_) hidden.requires_grad_(true);
  if (trains_ && keeps_gathered_ && !std::exchange(gathered_, true)) runtime_->core().keep_gathered(head_.unit);
  const PartScope part(*runtime_);
  UnitScope scope(runtime_, head_.unit);
  const at::Tensor logits = at::linear(hidden, head_.weight, head_.bias);
  const at::NoGradGuard no_grad;
  const at::Tensor own = logits.detach();
  const at::Tensor wide = as_wide(own);
  const at::Tensor local = state.targets - begin_of(stage_);
  state.is_own = local.ge(0).logical_and_(local.lt(own.size(1)));
  state.local_targets = local.masked_fill(state.is_own.logical_not(), 0);
  // Finite also where all logits are -inf, so that their exponentials are 0.
  const at::Tensor most = wide.amax(-1).clamp_min(-1e38);
  at::Tensor exponentials = (wide - most.unsqueeze(-1)).exp_();
  const at::Tensor sums = exponentials.sum(-1);
  const at::Tensor chosen =
      wide.gather(1, state.local_targets.unsqueeze(1)).squeeze(1).masked_fill(state.is_own.logical_not(), 0);
  state.scores = at::stack({most, sums, chosen});
  if (trains_ && !two_barriers_) {
    const at::Tensor weight = head_.weight.detach();
    exponentials.div_(sums.clamp_min(1e-30).unsqueeze(-1));
    state.soft = exponentials.to(weight.scalar_type()).matmul(weight);
    state.target_rows = weight.index_select(0, state.local_targets.masked_select(state.is_own));
  }
  if (trains_) state.logits = own;
  {
    const at::AutoGradMode grad(trains_);
    scope.finish({logits});
    if (trains_) state.graph = ChunkGraph({hidden}, {logits});
  }
}

void SharedHeadRun::send_scores(int micro_batch) {
  State& state = state_of(micro_batch);
  for (int to = 0; to < stages_; ++to) {
    if (to == stage_) continue;
    const bool with_gradient = to == root_ && trains_ && !two_barriers_;
    links_.send(to, parcel_of(ActionKind::kVocabSum, micro_batch),
                with_gradient ? sent({state.scores, state.soft, state.target_rows}) : sent({state.scores}));
  }
  if (!trains_) state.hidden = state.targets = state.local_targets = state.is_own = at::Tensor();
}

void SharedHeadRun::combine(int micro_batch) {
  State& state = state_of(micro_batch);
  if (std::exchange(state.combined, true)) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> scores;
  std::vector<at::Tensor> softs;
  std::vector<at::Tensor> rows;
  for (int from = 0; from < stages_; ++from) {
    std::vector<at::Tensor> tensors{state.scores, state.soft, state.target_rows};
    if (from != stage_) tensors = links_.receive(from, parcel_of(ActionKind::kVocabSum, micro_batch)).tensors;
    scores.push_back(tensors.at(0));
    if (!is_root() || !trains_ || two_barriers_) continue;
    softs.push_back(tensors.at(1));
    rows.push_back(tensors.at(2));
  }
  at::Tensor all = merged(scores);
  if (head_.beside) {
    const std::vector<std::int64_t> one_each(static_cast<std::size_t>(head_.beside->size()), 1);
    all = merged(gather_along(all.unsqueeze(0), 0, one_each, *head_.beside, kCallScores).unbind(0));
  }
  const at::Tensor most = all[0];
  const at::Tensor sum = all[1];
  const at::Tensor chosen = all[2];
  state.log_sum = most + sum.log();
  losses_ += state.parts * state.factor * (state.log_sum - chosen).sum(at::kDouble).item<double>() + state.constant;
  if (softs.empty()) return;
  // Of each token: what the stages' softmaxes are of that over all rows, less the row of the target.
  for (std::size_t from = 0; from < softs.size(); ++from) {
    const at::Tensor share = (scores[from][0] - most).exp_().mul_(scores[from][1]).div_(sum);
    const at::Tensor part = as_wide(softs[from]) * share.unsqueeze(-1);
    state.gradient = from == 0 ? part : state.gradient.add_(part);
    const int stage = static_cast<int>(from);
    const at::Tensor local = state.targets - begin_of(stage);
    const at::Tensor here = local.ge(0).logical_and_(local.lt(head_.rows[number_of(stage)])).nonzero().squeeze(1);
    state.gradient.index_add_(0, here, as_wide(rows[from]), -1);
  }
  if (head_.beside) state.gradient = sum_over(state.gradient, *head_.beside, kCallGradient);
  state.soft = state.target_rows = at::Tensor();
}

void SharedHeadRun::compute_gradients(int micro_batch, const zeroth::Engine::BackwardPart& part) {
  combine(micro_batch);
  State& state = state_of(micro_batch);
  const at::NoGradGuard no_grad;
  at::Tensor wide = (as_wide(state.logits) - state.log_sum.unsqueeze(-1)).exp_();
  wide.scatter_add_(1, state.local_targets.unsqueeze(1), state.is_own.to(wide.scalar_type()).neg().unsqueeze(1));
  if (wide.numel() > 0) wide.mul_(scaled_factor(state));
  const at::Tensor gradient = wide.to(state.logits.scalar_type());
  wide.reset();
  state.logits = state.local_targets = state.is_own = at::Tensor();
  runtime_->core().begin_part(part);
  const GradientUses uses = runtime_->counts_uses() ? state.graph.uses() : GradientUses();
  const std::uint64_t seen = runtime_->open_backward_of_part(&uses);
  try {
    state.graph.backward({gradient});
  } catch (...) {
    runtime_->fail_backward();
    throw;
  }
  runtime_->close_backward(seen);
  if (two_barriers_) state.gradient = state.graph.take_input_gradients().at(0);
  state.graph = ChunkGraph();
  if (keeps_gathered_ && micro_batch == last_micro_batch_ && std::exchange(gathered_, false))
    runtime_->core().give_back(head_.unit);
  // On the last chunk's stage the backward needs the rest, or has had it.
  if (!two_barriers_ && (!is_root() || std::exchange(state.is_half_done, true))) states_.erase(micro_batch);
}

void SharedHeadRun::send_gradient(int micro_batch) {
  if (is_root()) return;  // it goes with the others into the backward
  links_.send(root_, parcel_of(ActionKind::kVocabInputGradient, micro_batch), sent({state_of(micro_batch).gradient}));
  states_.erase(micro_batch);
}

double SharedHeadRun::scaled_factor(const State& state) const {
  const at::Tensor scaled = runtime_->first_gradient(at::ones({}, at::kDouble), {});
  return scaled.defined() ? state.factor * scaled.item<double>() : state.factor;
}

at::Tensor SharedHeadRun::input_gradient(int micro_batch) {
  const at::NoGradGuard no_grad;
  at::Tensor sum;
  if (two_barriers_) {
    for (int from = 0; from < stages_; ++from) {
      at::Tensor part = state_of(micro_batch).gradient;
      if (from != stage_)
        part = links_.receive(from, parcel_of(ActionKind::kVocabInputGradient, micro_batch)).tensors.at(0);
      sum = from == 0 ? as_wide(part) : sum + as_wide(part);
    }
    if (head_.beside) sum = sum_over(sum, *head_.beside, kCallGradient);
  } else {
    combine(micro_batch);
    sum = state_of(micro_batch).gradient;
    if (sum.numel() > 0) sum.mul_(scaled_factor(state_of(micro_batch)));
  }
  State& state = state_of(micro_batch);
  const at::Tensor gradient = at::zeros(state.whole.sizes(), state.whole.options());
  gradient.view({-1, gradient.size(-1)}).index_add_(0, state.rows, sum.to(gradient.scalar_type()));
  state.gradient = at::Tensor();
  if (two_barriers_ || std::exchange(state.is_half_done, true)) states_.erase(micro_batch);
  return gradient;
}

void SharedHeadRun::finish_scores() {
  while (!states_.empty()) {
    const int micro_batch = states_.begin()->first;
    combine(micro_batch);
    states_.erase(micro_batch);
  }
}

at::Tensor SharedHeadRun::logits(const at::Tensor& input, const Communicator& stages) {
  const at::NoGradGuard no_grad;
  const at::Tensor shared = shared_by(root_, {input}, stages).at(0).to(head_.weight.device());
  at::Tensor own;
  {
    Gathered weights(runtime_,
                     head_.bias.defined() ? std::vector<at::Tensor>{head_.weight, head_.bias}
                                          : std::vector<at::Tensor>{head_.weight},
                     Writers{});
    own = at::linear(shared, head_.weight, head_.bias).cpu();
    weights.finish();
  }
  const std::size_t ranks_of_stage = head_.rows.size() / static_cast<std::size_t>(stages_);
  const auto rows_of = [&](int stage) {
    return SizeSpan(head_.rows).subspan(static_cast<std::size_t>(stage) * ranks_of_stage, ranks_of_stage);
  };
  std::vector<std::int64_t> of_stages;
  for (int stage = 0; stage < stages_; ++stage) of_stages.push_back(sum_of_sizes(rows_of(stage)));
  if (head_.beside) own = gather_along(own, own.dim() - 1, rows_of(stage_), *head_.beside, kCallLogits);
  return gather_along(own, own.dim() - 1, of_stages, RankGroup(stages), kCallLogits).to(head_.weight.device());
}

void add_scores(StepProgram& forwards) {
  const int lag = forwards.ranks();
  for (int rank = 0; rank < forwards.ranks(); ++rank) {
    std::vector<Action>& actions = forwards.actions[static_cast<std::size_t>(rank)];
    std::vector<Action> result;
    const int chunks = static_cast<int>(forwards.chunks_of(rank).size());
    int done = 0;  // forwards of this rank
    int scored = 0;
    const auto score = [&] {
      for (const ActionKind kind : {ActionKind::kVocabScores, ActionKind::kVocabSum})
        result.push_back({.kind = kind, .micro_batch = scored});
      ++scored;
    };
    for (const Action& action : actions) {
      result.push_back(action);
      if (action.kind != ActionKind::kForward) continue;
      if (action.chunk + 1 == forwards.chunks())
        result.push_back({.kind = ActionKind::kVocabInput, .micro_batch = action.micro_batch});
      if (++done >= (scored + lag + 1) * chunks) score();
    }
    while (scored < forwards.micro_batches) score();
    actions = std::move(result);
  }
}

}  // namespace zeroth::libtorch
