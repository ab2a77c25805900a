#include "libtorch/parallel/part_of_loss.h"

#include "libtorch/parallel/group_call.h"
#include "libtorch/parallel/linear_call.h"

#include <zeroth/libtorch/loss_terms.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

namespace zeroth::libtorch {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr CallName kCallPart{.call = "part_of_loss", .number = 18};

class PartOfGradient : public torch::autograd::Function<PartOfGradient> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& term, std::int64_t parts) {
    context->saved_data["parts"] = parts;
    return term.alias();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {gradients[0] / context->saved_data["parts"].toInt(), at::Tensor()};
  }
};

void require_term(const at::Tensor& term, const RankGroup& group, const char* argument) {
  if (!term.defined() || !term.is_floating_point())
    refuse(group, kCallPart, argument, "this is no term of a loss", "a tensor of floating-point values",
           term.defined() ? c10::toString(term.scalar_type()) : "an undefined tensor");
  require_exchangeable(term, group, kCallPart, argument);
}

}  // namespace

at::Tensor with_part_of_gradient(const at::Tensor& term, int parts) {
  return PartOfGradient::apply(term, static_cast<std::int64_t>(parts));
}

at::Tensor part_of_loss(const at::Tensor& term, const RankGroup& group) {
  require_term(term, group, "term");
  return group.size() == 1 ? term : with_part_of_gradient(term, group.size());
}

at::Tensor part_of_loss(const at::Tensor& sum, std::int64_t count, const RankGroup& group) {
  require_term(sum, group, "sum");
  if (count < 0)
    refuse(group, kCallPart, "count", "a mean over fewer than no elements", "0 or more", std::to_string(count));
  const at::Tensor own = at::full({1}, count, at::kLong);
  const std::int64_t all = group.size() == 1 ? count : sum_over(own, group, kCallPart).item<std::int64_t>();
  const at::Tensor part = sum / std::max<std::int64_t>(all, 1);
  if (group.size() == 1) return part;
  return apply_linear(
      part, {.group = group, .name = kCallPart, .forward = LinearMap::kSum, .backward = LinearMap::kIdentity});
}

}  // namespace zeroth::libtorch
