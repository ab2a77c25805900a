#include "libtorch/experts/expert_call.h"
#include "libtorch/experts/torch_threads.h"

#include <kernels/moe/gate.h>
#include <zeroth/libtorch/router.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

namespace zeroth::libtorch {

at::Tensor greatest(const at::Tensor& values, std::int64_t count) {
  return std::get<1>(at::sort(values, /*stable=*/true, -1, /*descending=*/true)).narrow(-1, 0, count);
}

at::Tensor scores_by_operators(const at::Tensor& logits, bool sigmoid) {
  const at::Tensor wide = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
  return sigmoid ? at::sigmoid(wide) : at::softmax(wide, -1);
}

at::Tensor weights_by_operators(const at::Tensor& scores, const at::Tensor& experts, bool renormalize, double scale) {
  at::Tensor weights = at::gather(scores, 1, experts);
  if (renormalize) weights = weights / weights.sum(-1, /*keepdim=*/true);
  return scale == 1.0 ? weights : weights * scale;
}

namespace {

void require_options(const at::Tensor& logits, const RouterOptions& options) {
  if (!logits.defined() || logits.dim() != 2 || !logits.is_floating_point())
    refuse_experts("", "logits", "these are no logits of a router", "floating [tokens, experts]",
                   logits.defined() ? c10::str(logits.scalar_type(), " ", logits.sizes()) : "an undefined tensor");
  const std::int64_t experts = logits.size(1);
  if (options.choices < 1 || options.choices > experts)
    refuse_experts("", "choices", "a token cannot have so many experts", c10::str("1 to ", experts),
                   c10::str(options.choices));
  if (options.bias.defined() && (options.bias.dim() != 1 || options.bias.size(0) != experts))
    refuse_experts("", "bias", "this is no bias of the choice", c10::str("[", experts, "]"),
                   c10::str(options.bias.sizes()));
  const bool cuts = options.groups >= 1 && experts % options.groups == 0;
  if (!cuts || options.groups_kept < 1 || options.groups_kept > options.groups ||
      options.choices > options.groups_kept * (experts / options.groups))
    refuse_experts(
        "", "groups, groups_kept", "the experts of the groups that are kept are no choice",
        c10::str("groups that divide ", experts, " experts, and ", options.choices, " or more in those kept"),
        c10::str(options.groups, " groups, ", options.groups_kept, " kept"));
}

at::Tensor choice_by_operators(const at::Tensor& scores, const RouterOptions& options) {
  const at::NoGradGuard no_gradient;
  at::Tensor by = scores.detach();
  if (options.bias.defined()) by = by + options.bias;
  if (options.groups_kept < options.groups) {
    const std::int64_t of_group = scores.size(1) / options.groups;
    const at::Tensor in_groups = by.unflatten(1, {options.groups, of_group});
    const std::int64_t best = std::min<std::int64_t>(2, of_group);
    const at::Tensor of_groups = std::get<0>(in_groups.sort(-1, /*descending=*/true)).narrow(-1, 0, best).sum(-1);
    at::Tensor mask = at::full_like(of_groups, -std::numeric_limits<double>::infinity());
    mask.scatter_(1, greatest(of_groups, options.groups_kept), 0.0);
    by = (in_groups + mask.unsqueeze(-1)).flatten(1, 2);
  }
  return greatest(by, options.choices).contiguous();
}

/// What the kernels do: logits of the CPU, up to 1,024 experts and 64 choices, and a bias that is finite and not wider
/// than float32. (A bias of -inf, which forbids an expert, is left to the operators.)
bool has_gate_kernel(const at::Tensor& logits, const RouterOptions& options) {
  if (!logits.is_cpu() || logits.layout() != at::kStrided || !kernel_dtype(logits.scalar_type())) return false;
  if (logits.size(1) > kernels::kMostExperts || options.choices > kernels::kMostChosen) return false;
  if (!std::isfinite(options.scale)) return false;
  return !options.bias.defined() || (options.bias.is_floating_point() && options.bias.scalar_type() != at::kDouble &&
                                     options.bias.is_cpu() && at::isfinite(options.bias).all().item<bool>());
}

/// Tokens whose scores are worth a thread.
std::int64_t grain_of_tokens(const at::Tensor& logits) {
  constexpr std::int64_t kWorkOfALogit = 32;  // an exponential and a comparison, beside a byte that is moved
  return grain_of_rows(logits.size(1) * kWorkOfALogit);
}

/// The kernels gate() and gate_backward(): {experts of int32, weights, scores} of the logits.
class GateByKernels : public torch::autograd::Function<GateByKernels> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const at::Tensor& given,
                                                const std::optional<at::Tensor>& bias, const kernels::GateRule& rule) {
    const at::Tensor logits = given.contiguous();
    const std::int64_t tokens = logits.size(0);
    const at::TensorOptions of_weights = logits.options().dtype(weight_dtype(logits.scalar_type()));
    at::Tensor experts = at::empty({tokens, rule.k}, logits.options().dtype(at::kInt));
    at::Tensor weights = at::empty({tokens, rule.k}, of_weights);
    at::Tensor scores = at::empty({tokens, rule.experts}, of_weights);
    const kernels::GateArgs whole{.rule = rule,
                                  .logits = logits.const_data_ptr(),
                                  .dtype = *kernel_dtype(logits.scalar_type()),
                                  .bias = bias ? bias->const_data_ptr<float>() : nullptr,
                                  .chosen = experts.data_ptr<std::int32_t>(),
                                  .weights = weights.data_ptr(),
                                  .scores = scores.data_ptr()};
    for_parts(tokens, grain_of_tokens(logits), [&](std::int64_t begin, std::int64_t end) {
      kernels::GateArgs part = whole;
      part.tokens = end - begin;
      part.logits = row_of(logits, begin);
      part.chosen = whole.chosen + begin * rule.k;
      part.weights = row_of(weights, begin);
      part.scores = row_of(scores, begin);
      kernels::gate(part, kernels::best_isa());
    });
    context->set_materialize_grads(false);
    context->mark_non_differentiable({experts});
    context->save_for_backward({given, experts});
    context->saved_data["sigmoid"] = rule.score == kernels::GateScore::kSigmoid;
    context->saved_data["renormalize"] = rule.renormalize;
    context->saved_data["scale"] = rule.scale;
    return {experts, weights, scores};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const torch::autograd::variable_list saved = context->get_saved_variables();
    const at::Tensor& experts = saved[1];
    const kernels::GateRule rule{
        .experts = saved[0].size(1),
        .k = experts.size(1),
        .score = context->saved_data["sigmoid"].toBool() ? kernels::GateScore::kSigmoid : kernels::GateScore::kSoftmax,
        .renormalize = context->saved_data["renormalize"].toBool(),
        .scale = context->saved_data["scale"].toDouble()};
    if (!gradients[1].defined() && !gradients[2].defined()) return torch::autograd::variable_list(3);
    if (at::GradMode::is_enabled()) return {by_operators(saved[0], experts, rule, gradients), {}, {}};
    const at::Tensor logits = saved[0].contiguous();
    const at::Tensor d_weights = gradients[1].defined() ? gradients[1].contiguous() : at::Tensor();
    at::Tensor d_scores = gradients[2];
    at::Tensor d_sums;
    // That of a sum over tokens, as of a balance loss, has one row for all tokens.
    if (d_scores.defined() && d_scores.size(0) > 0 && d_scores.stride(0) == 0) {
      d_sums = d_scores.select(0, 0).to(at::kDouble).contiguous();
      d_scores.reset();
    }
    if (d_scores.defined()) d_scores = d_scores.contiguous();
    at::Tensor d_logits = at::empty(logits.sizes(), logits.options());
    const kernels::GateBackwardArgs whole{.rule = rule,
                                          .dtype = *kernel_dtype(logits.scalar_type()),
                                          .chosen = experts.const_data_ptr<std::int32_t>(),
                                          .d_score_sums = d_sums.defined() ? d_sums.const_data_ptr<double>() : nullptr};
    for_parts(logits.size(0), grain_of_tokens(logits), [&](std::int64_t begin, std::int64_t end) {
      kernels::GateBackwardArgs part = whole;
      part.tokens = end - begin;
      part.logits = row_of(logits, begin);
      part.chosen = whole.chosen + begin * rule.k;
      part.d_weights = d_weights.defined() ? row_of(d_weights, begin) : nullptr;
      part.d_scores = d_scores.defined() ? row_of(d_scores, begin) : nullptr;
      part.d_logits = row_of(d_logits, begin);
      kernels::gate_backward(part, kernels::best_isa());
    });
    return {d_logits, {}, {}};
  }

 private:
  static char* row_of(const at::Tensor& tensor, std::int64_t row) {
    return static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())) +  // NOLINT: kernels do not write to inputs
           row * tensor.size(1) * static_cast<std::int64_t>(tensor.element_size());
  }

  /// The gradient as a graph, for gradients of it.
  static at::Tensor by_operators(const at::Tensor& logits, const at::Tensor& experts, const kernels::GateRule& rule,
                                 const torch::autograd::variable_list& gradients) {
    const at::Tensor scores = scores_by_operators(logits, rule.score == kernels::GateScore::kSigmoid);
    torch::autograd::variable_list outputs;
    torch::autograd::variable_list of_outputs;
    if (gradients[1].defined()) {
      outputs.push_back(weights_by_operators(scores, experts.to(at::kLong), rule.renormalize, rule.scale));
      of_outputs.push_back(gradients[1]);
    }
    if (gradients[2].defined()) {
      outputs.push_back(scores);
      of_outputs.push_back(gradients[2]);
    }
    return torch::autograd::grad(outputs, {logits}, of_outputs, /*retain_graph=*/true, /*create_graph=*/true)[0];
  }
};

}  // namespace

Routing route(const at::Tensor& logits, const RouterOptions& options) {
  require_options(logits, options);
  const bool sigmoid = options.score == RouterScore::kSigmoid;
  if (has_gate_kernel(logits, options)) {
    const kernels::GateRule rule{
        .experts = logits.size(1),
        .k = options.choices,
        .score = sigmoid ? kernels::GateScore::kSigmoid : kernels::GateScore::kSoftmax,
        .renormalize = options.renormalize,
        .scale = options.scale,
        .groups = options.groups,
        .kept_groups = options.groups_kept,
    };
    const at::Tensor bias = options.bias.defined() ? options.bias.detach().to(at::kFloat).contiguous() : at::Tensor();
    const torch::autograd::variable_list routed =
        GateByKernels::apply(logits, bias.defined() ? std::optional(bias) : std::nullopt, rule);
    return {routed[0].to(at::kLong), routed[1], routed[2]};
  }
  Routing routing;
  routing.scores = scores_by_operators(logits, sigmoid);
  routing.experts = choice_by_operators(routing.scores, options);
  routing.weights = weights_by_operators(routing.scores, routing.experts, options.renormalize, options.scale);
  return routing;
}

}  // namespace zeroth::libtorch
