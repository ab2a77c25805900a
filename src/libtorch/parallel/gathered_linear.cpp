#include "libtorch/parallel/group_call.h"

#include <zeroth/libtorch/tensor_parallel.h>

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace zeroth::libtorch {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr CallName kCallGatheredLinear{.call = "gathered_linear", .number = 14};

/// What a node of autograd keeps beside tensors.
struct Gathering final : torch::CustomClassHolder {
  Gathering(RankGroup kept_group, CallName kept_call, std::int64_t kept_dim, std::vector<std::int64_t> kept_sizes,
            bool kept_has_grad)
      : group(std::move(kept_group)),
        call(kept_call),
        dim(kept_dim),
        sizes(std::move(kept_sizes)),
        has_grad(kept_has_grad) {}
  [[nodiscard]] CallName name(bool is_backward) const {
    CallName named = call;
    named.is_backward = is_backward;
    named.has_grad = has_grad && !is_backward;
    return named;
  }
  [[nodiscard]] at::Tensor gather(const at::Tensor& x, bool is_backward) const {
    return gather_along(x, dim, sizes, group, name(is_backward));
  }
  RankGroup group;
  CallName call;
  std::int64_t dim;
  std::vector<std::int64_t> sizes;
  bool has_grad;
};

/// The product without its bias, whose gradient torch makes.
class GatheredProduct : public torch::autograd::Function<GatheredProduct> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const c10::intrusive_ptr<Gathering>& gathering) {
    context->save_for_backward({x, weight});
    context->saved_data["gathering"] = at::IValue::make_capsule(gathering);
    return at::linear(gathering->gather(x, /*is_backward=*/false), weight);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    const auto capsule = context->saved_data["gathering"].toCapsule();
    const auto& gathering = static_cast<const Gathering&>(*capsule);
    if (at::GradMode::is_enabled())
      refuse(gathering.group, gathering.name(/*is_backward=*/true), "create_graph",
             "there is no gradient of this gradient", "create_graph=False", "create_graph=True",
             "use all_gather() and torch's linear");
    // Under autocast the three may have other dtypes.
    const at::Tensor gradient = gradients[0].to(weight.scalar_type());
    variable_list result(3);
    if (context->needs_input_grad(1)) {
      const at::Tensor whole = gathering.gather(x, /*is_backward=*/true).to(weight.scalar_type());
      result[1] = gradient.reshape({-1, gradient.size(-1)}).t().matmul(whole.reshape({-1, whole.size(-1)}));
    }
    if (context->needs_input_grad(0)) {
      result[0] = reduce_scatter_along(gradient.matmul(weight).to(x.scalar_type()), gathering.dim, gathering.sizes,
                                       gathering.group, gathering.name(/*is_backward=*/true));
    }
    return result;
  }
};

}  // namespace

at::Tensor gathered_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, std::int64_t dim,
                           const RankGroup& group, const SliceSizes& sizes) {
  require_exchangeable(x, group, kCallGatheredLinear, "x");
  require_exchangeable(weight, group, kCallGatheredLinear, "weight");
  const std::int64_t from_0 = dim_of(x, dim, group, kCallGatheredLinear);
  const bool same_dtype =
      x.scalar_type() == weight.scalar_type() || at::autocast::is_autocast_enabled(x.device().type());
  if (weight.dim() != 2 || x.size(-1) != weight.size(1) || !same_dtype || !x.is_floating_point())
    refuse(group, kCallGatheredLinear, "x", "the product of x and weight does not exist",
           "floating x [..., features] and weight [own features, features]",
           c10::str(x.scalar_type(), " ", x.sizes(), " and ", weight.scalar_type(), " ", weight.sizes()));
  if (from_0 == x.dim() - 1)
    refuse(group, kCallGatheredLinear, "dim", "the features are whole on every rank", "a dim before the last",
           c10::str(dim, " for shape ", x.sizes()));
  std::vector<std::int64_t> slices = sizes_with_own(x, from_0, sizes, group, kCallGatheredLinear, "sizes");
  if (group.size() == 1) return at::linear(x, weight, bias);
  const bool has_grad = at::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad());
  const CallName call = with_sizes(kCallGatheredLinear, sizes, "sizes");
  const auto gathering = c10::make_intrusive<Gathering>(group, call, from_0, std::move(slices), has_grad);
  const at::Tensor product = GatheredProduct::apply(x, weight, gathering);
  return bias.defined() ? product + bias : product;
}

}  // namespace zeroth::libtorch
