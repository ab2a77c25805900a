#include "libtorch/experts/expert_call.h"
#include "libtorch/experts/gate_draws.h"

#include <zeroth/base/text.h>
#include <zeroth/libtorch/kept_calls.h>
#include <zeroth/libtorch/moe.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

namespace zeroth::libtorch {
namespace {

constexpr float kJitterEpsilon = 0.01F;
/// Forwards of a step that a backward may repeat.
constexpr std::size_t kMostMade = 1024;

void require_choices(std::int64_t choices, std::int64_t num_experts, const char* which) {
  if (choices < 1 || choices > num_experts)
    refuse_experts("", which, "a token cannot have so many experts", c10::str("1 to ", num_experts), c10::str(choices));
}

void require_gate_input(const GateInput& input, std::int64_t num_experts) {
  const at::Tensor& x = input.x;
  if (!x.defined() || x.dim() != 2 || !x.is_floating_point())
    refuse_experts("", "x", "these are no tokens", "floating [tokens, width]",
                   x.defined() ? c10::str(x.scalar_type(), " ", x.sizes()) : "an undefined tensor");
  const at::Tensor& weight = input.weight;
  if (!weight.defined() || weight.dim() != 2 || weight.size(0) != num_experts || weight.size(1) != x.size(1))
    refuse_experts("", "weight", "this is no matrix of the router", c10::str("[", num_experts, ", ", x.size(1), "]"),
                   weight.defined() ? c10::str(weight.sizes()) : "an undefined tensor");
  if (input.used.defined() && input.used.numel() != x.size(0))
    refuse_experts("", "used", "these are not the tokens", c10::str("[", x.size(0), "]"), c10::str(input.used.sizes()));
}

/// Of some columns of all tokens.
std::uint64_t digest_of(const at::Tensor& x) {
  const std::int64_t stride = std::max<std::int64_t>(x.size(1) / 16, 1);
  const at::Tensor some = x.detach().slice(1, 0, x.size(1), stride).contiguous().cpu();
  return digest64({static_cast<const char*>(some.const_data_ptr()), some.nbytes()},
                  static_cast<std::uint64_t>(x.size(0)));
}

}  // namespace

std::int64_t choices_at(std::int64_t step, std::int64_t steps, std::int64_t first, std::int64_t last) {
  if (steps < 1 || step < 0)
    refuse_experts("", "step, steps", "there is no such place in a schedule", "a step from 0, of 1 or more",
                   c10::str(step, " of ", steps));
  if (first < 1 || last < first)
    refuse_experts("", "first, last", "choices of a token do not grow so", "1 <= first <= last",
                   c10::str(first, " to ", last));
  return first + (last - first) * std::min(step, steps) / steps;
}

Gate::Gate(std::int64_t num_experts, GateOptions options)
    : num_experts_(num_experts), options_(std::move(options)), load_(num_experts) {
  if (num_experts < 1) refuse_experts("", "num_experts", "there are no experts", "1 or more", c10::str(num_experts));
  if (options_.schedule) {
    const auto [first, last, steps] = *options_.schedule;
    (void)choices_at(0, steps, first, last);
    require_choices(last, num_experts, "schedule");
  } else {
    require_choices(options_.router.choices, num_experts, "choices");
  }
  const RouterOptions& router = options_.router;
  const bool is_plain = router.score == RouterScore::kSoftmax && router.groups == 1 && !options_.rule &&
                        options_.balance == BalanceBy::kLoss;
  if (!is_plain && (options_.noise == GateNoise::kGumbel || options_.top2_2nd_expert_sampling))
    refuse_experts("", "noise, top2_2nd_expert_sampling", "experts are drawn from a softmax alone",
                   "softmax without groups, a bias or a rule; or noise none or jitter, and no second expert drawn",
                   "another choice");
  set_capacity(options_.capacity_factor, options_.eval_capacity_factor, options_.min_capacity);
}

void Gate::set_capacity(double factor, double eval_factor, std::int64_t least) {
  if (options_.drop_tokens) {
    for (const double one : {factor, eval_factor}) (void)expert_capacity(1, num_experts_, 1, one, least);
  }
  options_.capacity_factor = factor;
  options_.eval_capacity_factor = eval_factor;
  options_.min_capacity = least;
}

void Gate::balance_over(std::vector<RankGroup> groups) {
  groups_ = std::move(groups);
  place_ = 0;
  for (const RankGroup& group : groups_) place_ = place_ * group.size() + group.rank();
}

void Gate::set_choices(std::int64_t choices) {
  if (options_.schedule)
    refuse_experts("", "choices", "a schedule says how many experts a token has", "a gate without a schedule",
                   c10::str(choices));
  require_choices(choices, num_experts_, "choices");
  options_.router.choices = choices;
}

std::int64_t Gate::choices(std::int64_t step) const {
  if (!options_.schedule) return options_.router.choices;
  return choices_at(step, options_.schedule->steps, options_.schedule->first, options_.schedule->last);
}

Routing Gate::choose(const at::Tensor& logits, const GateInput& input) const {
  RouterOptions router = options_.router;
  router.choices = choices(input.step);
  router.renormalize = router.renormalize && router.choices > 1;
  router.bias = input.bias;
  if (options_.rule) {
    Routing routing = options_.rule(logits, router);
    const bool fits = routing.experts.defined() && routing.experts.dim() == 2 && routing.weights.defined() &&
                      routing.experts.size(0) == logits.size(0) && routing.experts.sizes() == routing.weights.sizes();
    if (!fits || !routing.scores.defined() || routing.scores.sizes() != logits.sizes())
      refuse_experts(
          "", "rule", "this is no routing of the tokens",
          c10::str("experts and weights [", logits.size(0), ", k], scores [", logits.size(0), ", ", num_experts_, "]"),
          routing.experts.defined() && routing.weights.defined() && routing.scores.defined()
              ? c10::str(routing.experts.sizes(), ", ", routing.weights.sizes(), ", ", routing.scores.sizes())
              : "an undefined tensor");
    return routing;
  }
  const bool draws_all = input.training && options_.noise == GateNoise::kGumbel;
  const bool draws_second = input.training && options_.top2_2nd_expert_sampling && router.choices == 2;
  if (!draws_all && !draws_second) return route(logits, router);
  Routing routing;
  routing.scores = scores_by_operators(logits, /*sigmoid=*/false);
  {
    const at::NoGradGuard no_gradient;
    const std::uint64_t seed = seed_of_draw(GateDraw::kGumbel, options_.seed, input.number, place_);
    const at::Tensor uniform = uniform_numbers(logits.size(0), logits.size(1), seed);
    const at::Tensor compared = logits.detach().to(at::kDouble) + (-at::log(-at::log(uniform))).to(logits.device());
    if (draws_second) {
      const at::Tensor first = greatest(draws_all ? compared : logits.detach(), 1);
      const at::Tensor others = compared.scatter(-1, first, -std::numeric_limits<double>::infinity());
      routing.experts = at::cat({first, greatest(others, 1)}, -1);
    } else {
      routing.experts = greatest(compared, router.choices).contiguous();
    }
  }
  routing.weights = weights_by_operators(routing.scores, routing.experts, router.renormalize, router.scale);
  return routing;
}

bool Gate::is_repeated() {
  return torch::autograd::get_current_graph_task_id() >= 0;
}

Gate::Made& Gate::made_with(const GateInput& input) {
  const std::uint64_t tokens = digest_of(input.x);
  if (is_repeated()) {
    const auto found =
        std::find_if(made_.rbegin(), made_.rend(), [&](const Made& one) { return one.tokens == tokens; });
    if (found != made_.rend()) return *found;
    // A product may differ in its last bits when it is computed again.
    if (made_.size() == 1) return made_.front();
    refuse_experts("", "x", "a forward inside a backward repeats none of this step",
                   "the tokens of one of its forwards", c10::str("others than those of ", made_.size(), " forwards"));
  }
  if (made_.size() == kMostMade) made_.erase(made_.begin());
  return made_.emplace_back(
      Made{.tokens = tokens, .number = input.number, .step = input.step, .load = ExpertLoad(num_experts_)});
}

Gated Gate::forward(const GateInput& given) {
  require_gate_input(given, num_experts_);
  GateInput input = given;
  Made* made = nullptr;
  if (input.training) {
    made = &made_with(input);
    input.number = made->number;
    input.step = made->step;
  }
  const std::int64_t tokens = input.x.size(0);
  at::Tensor x = input.x;
  if (input.training && options_.noise == GateNoise::kJitter) {
    const std::uint64_t seed = seed_of_draw(GateDraw::kJitter, options_.seed, input.number, place_);
    const at::ScalarType wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor factors = jitter_factors(tokens, x.size(1), kJitterEpsilon, seed).to(x.device(), wide);
    x = (x.to(wide) * factors).to(input.x.scalar_type());
  }
  Gated gated;
  gated.logits = at::linear(x, input.weight.to(x.scalar_type()));
  Routing routing = choose(gated.logits, input);
  gated.weights = routing.weights;
  gated.scores = routing.scores;
  gated.experts = routing.experts;
  if (input.used.defined())
    gated.experts =
        gated.experts.masked_fill(input.used.to(gated.experts.device(), at::kBool).reshape({-1, 1}).logical_not(), -1);
  ExpertLoad load(num_experts_);
  if (!input.training) {
    load.add(gated.experts, groups_);
  } else if (is_repeated()) {
    if (hands_out_calls()) load.add(gated.experts, groups_);  // takes the sum that the forward kept
    load = made->load;
  } else {
    load_.add(gated.experts, groups_);
    load = made->load = load_;
  }
  gated.balance = options_.balance == BalanceBy::kBias ? at::zeros({}, gated.scores.options().requires_grad(false))
                                                       : load.balance_loss(gated.scores);
  const at::Tensor chosen = gated.experts.detach().to(at::kCPU, at::kLong).contiguous();
  const std::vector<std::int64_t> counts = count_choices(chosen, num_experts_);
  gated.counts = at::tensor(counts, at::kLong);
  gated.kept = gated.experts;
  if (options_.drop_tokens) {
    const double factor = input.training ? options_.capacity_factor : options_.eval_capacity_factor;
    const std::int64_t capacity =
        expert_capacity(tokens, num_experts_, gated.experts.size(1), factor, options_.min_capacity);
    if (std::ranges::any_of(counts, [capacity](std::int64_t count) { return count > capacity; })) {
      const bool draws = options_.use_rts && input.training;
      const std::uint64_t seed = seed_of_draw(GateDraw::kDrop, options_.seed, input.number, place_);
      gated.kept = keep_within(gated.experts, gated.weights, num_experts_, capacity,
                               draws ? KeepBy::kDraw : KeepBy::kPosition, seed);
      for (const std::int64_t count : counts) gated.dropped += std::max<std::int64_t>(count - capacity, 0);
    }
  }
  return gated;
}

void Gate::begin_step(const at::Tensor& bias) {
  if (options_.balance != BalanceBy::kLoss) update_balance_bias(bias, load_.chosen(), options_.bias_rate);
  load_.begin_step();
  made_.clear();
}

at::Tensor fixed_router_weight(std::int64_t num_experts, std::int64_t width, std::uint64_t seed) {
  if (num_experts < 1 || width < 1)
    refuse_experts("", "num_experts, width", "there is no such router", "1 or more of both",
                   c10::str(num_experts, " and ", width));
  const at::Tensor uniform = uniform_numbers(num_experts, width, seed_of_draw(GateDraw::kRouter, seed, 0, 0));
  const double bound = 1.0 / std::sqrt(static_cast<double>(width));
  return ((uniform * 2.0 - 1.0) * bound).to(at::kFloat);
}

}  // namespace zeroth::libtorch
