#include "libtorch/experts/expert_call.h"

#include <zeroth/libtorch/router.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <c10/util/StringUtil.h>

#include <limits>
#include <tuple>

namespace zeroth::libtorch {
namespace {

/// The numbers of the greatest, of equal ones the lowest.
at::Tensor greatest(const at::Tensor& values, std::int64_t count) {
  return std::get<1>(at::sort(values, /*stable=*/true, -1, /*descending=*/true)).narrow(-1, 0, count);
}

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

}  // namespace

Routing route(const at::Tensor& logits, const RouterOptions& options) {
  require_options(logits, options);
  const at::Tensor wide = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
  Routing routing;
  routing.scores = options.score == RouterScore::kSoftmax ? at::softmax(wide, -1) : at::sigmoid(wide);
  {
    const at::NoGradGuard no_gradient;
    at::Tensor by = routing.scores.detach();
    if (options.bias.defined()) by = by + options.bias;
    if (options.groups_kept < options.groups) {
      const std::int64_t of_group = logits.size(1) / options.groups;
      const at::Tensor in_groups = by.unflatten(1, {options.groups, of_group});
      const std::int64_t best = std::min<std::int64_t>(2, of_group);
      const at::Tensor of_groups = std::get<0>(in_groups.sort(-1, /*descending=*/true)).narrow(-1, 0, best).sum(-1);
      at::Tensor mask = at::full_like(of_groups, -std::numeric_limits<double>::infinity());
      mask.scatter_(1, greatest(of_groups, options.groups_kept), 0.0);
      by = (in_groups + mask.unsqueeze(-1)).flatten(1, 2);
    }
    routing.experts = greatest(by, options.choices).contiguous();
  }
  at::Tensor weights = at::gather(routing.scores, 1, routing.experts);
  if (options.renormalize) weights = weights / weights.sum(-1, /*keepdim=*/true);
  routing.weights = options.scale == 1.0 ? weights : weights * options.scale;
  return routing;
}

}  // namespace zeroth::libtorch
