#include "libtorch/experts/expert_call.h"

#include <zeroth/libtorch/experts.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstddef>
#include <utility>

namespace zeroth::libtorch {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Calls body(expert, first row, rows) for experts with rows.
template <class Body>
void for_experts(const std::vector<std::int64_t>& rows, Body&& body) {
  std::int64_t first = 0;
  for (std::size_t expert = 0; expert < rows.size(); ++expert) {
    if (rows[expert] > 0) body(static_cast<std::int64_t>(expert), first, rows[expert]);
    first += rows[expert];
  }
}

class GroupedProduct : public torch::autograd::Function<GroupedProduct> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::vector<std::int64_t>& rows) {
    context->save_for_backward({x, weight});
    context->saved_data["rows"] = rows;
    at::Tensor out = at::empty({x.size(0), weight.size(1)}, x.options());
    for_experts(rows, [&](std::int64_t expert, std::int64_t first, std::int64_t count) {
      at::Tensor part = out.narrow(0, first, count);
      at::mm_out(part, x.narrow(0, first, count), weight.select(0, expert).t());
    });
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (at::GradMode::is_enabled())
      refuse_experts("", "create_graph", "there is no gradient of grouped_linear()'s gradient", "create_graph=False",
                     "create_graph=True");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    const auto rows = context->saved_data["rows"].toIntVector();
    const at::Tensor gradient = gradients[0].to(weight.scalar_type()).contiguous();
    variable_list result(3);
    if (context->needs_input_grad(1)) {
      result[1] = at::zeros(weight.sizes(), weight.options());
      for_experts(rows, [&](std::int64_t expert, std::int64_t first, std::int64_t count) {
        at::Tensor part = result[1].select(0, expert);
        at::mm_out(part, gradient.narrow(0, first, count).t(), x.narrow(0, first, count));
      });
    }
    if (context->needs_input_grad(0)) {
      result[0] = at::empty(x.sizes(), x.options());
      for_experts(rows, [&](std::int64_t expert, std::int64_t first, std::int64_t count) {
        at::Tensor part = result[0].narrow(0, first, count);
        at::mm_out(part, gradient.narrow(0, first, count), weight.select(0, expert));
      });
    }
    return result;
  }
};

}  // namespace

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                          const std::vector<std::int64_t>& rows) {
  if (!weight.defined() || weight.dim() != 3)
    refuse_experts("", "weight", "these are no matrices of experts", "[experts, out, in]",
                   weight.defined() ? c10::str(weight.sizes()) : "an undefined tensor");
  if (static_cast<std::int64_t>(rows.size()) != weight.size(0))
    refuse_experts("", "rows", "there are not as many numbers as experts", c10::str(weight.size(0)),
                   c10::str(rows.size()));
  std::int64_t total = 0;
  for (const std::int64_t count : rows) {
    if (count < 0) refuse_experts("", "rows", "an expert has less than no row", "0 or more", c10::str(count));
    total += count;
  }
  if (!x.defined() || x.dim() != 2 || x.size(0) != total || x.size(1) != weight.size(2))
    refuse_experts("", "x", "these are not the rows of the experts", c10::str("[", total, ", ", weight.size(2), "]"),
                   x.defined() ? c10::str(x.sizes()) : "an undefined tensor");
  const at::DeviceType device = x.device().type();
  const at::ScalarType dtype =
      at::autocast::is_autocast_enabled(device) ? at::autocast::get_autocast_dtype(device) : weight.scalar_type();
  if (x.scalar_type() != weight.scalar_type() && !at::autocast::is_autocast_enabled(device))
    refuse_experts("", "x", "rows and matrices have other dtypes", c10::str(weight.scalar_type()),
                   c10::str(x.scalar_type()));
  if (bias.defined() && (bias.dim() != 2 || bias.size(0) != weight.size(0) || bias.size(1) != weight.size(1)))
    refuse_experts("", "bias", "this is not the bias of the experts",
                   c10::str("[", weight.size(0), ", ", weight.size(1), "]"), c10::str(bias.sizes()));
  const at::Tensor product = GroupedProduct::apply(x.to(dtype).contiguous(), weight.to(dtype), rows);
  if (!bias.defined()) return product;
  const at::Tensor counts = at::tensor(rows, at::kLong).to(x.device());
  return product + bias.to(dtype).repeat_interleave(counts, 0, total);
}

}  // namespace zeroth::libtorch
