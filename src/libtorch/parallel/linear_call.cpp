#include "libtorch/parallel/linear_call.h"

#include <zeroth/base/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <utility>

namespace zeroth::libtorch {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What a node of autograd keeps.
struct Kept final : torch::CustomClassHolder {
  explicit Kept(LinearCall kept) : call(std::move(kept)) {}
  LinearCall call;
};

at::Tensor padded(const at::Tensor& x, const LinearCall& call) {
  const OwnPart own = own_part(call.sizes, call.group.rank());
  std::vector<std::int64_t> shape = x.sizes().vec();
  std::int64_t& whole = shape[static_cast<std::size_t>(call.dim)];
  whole = 0;
  for (const std::int64_t size : call.sizes) whole += size;
  at::Tensor out = at::zeros(shape, x.options());
  out.narrow(call.dim, own.begin, own.length).copy_(x);
  return out;
}

at::Tensor compute(const at::Tensor& x, const LinearCall& call) {
  const RankGroup& group = call.group;
  switch (call.forward) {
    case LinearMap::kIdentity:
      return x;
    case LinearMap::kSum:
      return sum_over(x, group, call.name);
    case LinearMap::kSlice: {
      const OwnPart own = own_part(call.sizes, group.rank());
      // A copy: a view would keep all of x, and could not be written to.
      return x.narrow(call.dim, own.begin, own.length).clone(at::MemoryFormat::Contiguous);
    }
    case LinearMap::kPad:
      return padded(x, call);
    case LinearMap::kFirst:
      return group.rank() == 0 ? x.clone(at::MemoryFormat::Contiguous)
                               : at::zeros_like(x, {}, at::MemoryFormat::Contiguous);
    case LinearMap::kGather:
      return gather_along(x, call.dim, call.sizes, group, call.name);
    case LinearMap::kReduceScatter:
      return reduce_scatter_along(x, call.dim, call.sizes, group, call.name);
    case LinearMap::kExchange:
      return exchange_along(x, call.dim, call.sizes, call.other_dim, call.other_sizes, group, call.name);
  }
  throw Error(ErrorCode::kInternal, "there is no such map", {.where = "libtorch.collectives"});
}

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const LinearCall& call) {
    context->saved_data["call"] = at::IValue::make_capsule(c10::make_intrusive<Kept>(call.transposed()));
    return compute(x, call);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto kept = context->saved_data["call"].toCapsule();
    return {apply_linear(gradients[0], static_cast<const Kept&>(*kept).call), at::Tensor()};
  }
};

}  // namespace

LinearCall LinearCall::transposed() const {
  LinearCall call = *this;
  std::swap(call.forward, call.backward);
  call.name.is_backward = true;
  if (forward == LinearMap::kExchange) {
    std::swap(call.dim, call.other_dim);
    std::swap(call.sizes, call.other_sizes);
  }
  return call;
}

at::Tensor apply_linear(const at::Tensor& x, const LinearCall& call) {
  LinearCall named = call;
  // Ranks compare it where both ways are calls: one that has no gradient would be awaited in backward by the others.
  named.name.has_grad =
      calls_ranks(call.forward) && calls_ranks(call.backward) && at::GradMode::is_enabled() && x.requires_grad();
  return LinearFunction::apply(x, std::as_const(named));
}

}  // namespace zeroth::libtorch
