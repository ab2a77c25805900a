#include "libtorch/experts/expert_call.h"

#include <zeroth/libtorch/experts.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cstddef>
#include <optional>
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

/// Rows of all experts, one expert after the other.
template <class Body>
at::Tensor joined_rows(const std::vector<std::int64_t>& rows, const at::Tensor& none, Body&& body) {
  std::vector<at::Tensor> parts;
  for_experts(rows, [&](std::int64_t expert, std::int64_t first, std::int64_t count) {
    parts.push_back(body(expert, first, count));
  });
  return parts.empty() ? none : at::cat(parts);
}

class GroupedProduct : public torch::autograd::Function<GroupedProduct> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const std::vector<std::int64_t>& rows) {
    context->save_for_backward({x, weight});
    context->saved_data["rows"] = rows;
    context->saved_data["bias"] = bias.has_value();
    at::Tensor out = at::empty({x.size(0), weight.size(1)}, x.options());
    for_experts(rows, [&](std::int64_t expert, std::int64_t first, std::int64_t count) {
      at::Tensor part = out.narrow(0, first, count);
      const at::Tensor of_expert = x.narrow(0, first, count);
      const at::Tensor matrix = weight.select(0, expert).t();
      if (bias) {
        at::addmm_out(part, bias->select(0, expert), of_expert, matrix);
      } else {
        at::mm_out(part, of_expert, matrix);
      }
    });
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    const auto rows = context->saved_data["rows"].toIntVector();
    const at::Tensor gradient = gradients[0].to(weight.scalar_type()).contiguous();
    variable_list result(4);
    if (at::GradMode::is_enabled()) return by_operators(context, x, weight, gradient, rows);
    if (context->needs_input_grad(1)) {
      result[1] = at::empty(weight.sizes(), weight.options());
      for (std::size_t expert = 0; expert < rows.size(); ++expert) {
        if (rows[expert] == 0) result[1].select(0, static_cast<std::int64_t>(expert)).zero_();
      }
      for_experts(rows, [&](std::int64_t expert, std::int64_t first, std::int64_t count) {
        at::Tensor part = result[1].select(0, expert);
        at::mm_out(part, gradient.narrow(0, first, count).t(), x.narrow(0, first, count));
      });
    }
    if (has_bias(context) && context->needs_input_grad(2)) {
      result[2] = at::zeros({weight.size(0), weight.size(1)}, gradient.options());
      for_experts(rows, [&](std::int64_t expert, std::int64_t first, std::int64_t count) {
        at::Tensor part = result[2].select(0, expert);
        at::sum_out(part, gradient.narrow(0, first, count), 0);
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

 private:
  static bool has_bias(AutogradContext* context) { return context->saved_data["bias"].toBool(); }

  /// Of a gradient that has a gradient of its own.
  static variable_list by_operators(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                                    const at::Tensor& gradient, const std::vector<std::int64_t>& rows) {
    variable_list of_weights;
    variable_list of_biases;
    std::int64_t first = 0;
    for (const std::int64_t count : rows) {
      const at::Tensor part = gradient.narrow(0, first, count);
      of_weights.push_back(at::mm(part.t(), x.narrow(0, first, count)));
      of_biases.push_back(part.sum(0));
      first += count;
    }
    const at::Tensor of_x =
        joined_rows(rows, at::zeros_like(x), [&](std::int64_t expert, std::int64_t begin, std::int64_t count) {
          return at::mm(gradient.narrow(0, begin, count), weight.select(0, expert));
        });
    return {of_x, at::stack(of_weights), has_bias(context) ? at::stack(of_biases) : at::Tensor(), {}};
  }
};

/// The gradient of a stack of parts, filled part by part.
struct PartGradients : torch::CustomClassHolder {
  std::vector<std::int64_t> sizes{};
  at::Tensor whole{};  ///< while a backward fills it

  at::Tensor place(std::int64_t number, const at::TensorOptions& options) {
    if (!whole.defined()) whole = at::empty(sizes, options);
    return whole.select(0, number);
  }
};

PartGradients& part_gradients_of(AutogradContext* context, const char* name) {
  return static_cast<PartGradients&>(*context->saved_data[name].toCapsule());
}

/// A part as it is; in backward its gradient goes to its place in the whole, and what was computed is let go.
class PlacedPart : public torch::autograd::Function<PlacedPart> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& part, std::int64_t number,
                            const c10::intrusive_ptr<PartGradients>& gradients) {
    context->saved_data["number"] = number;
    context->saved_data["gradients"] = c10::IValue::make_capsule(gradients);
    return part.view_as(part);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (at::GradMode::is_enabled()) return {gradients[0], {}, {}};
    const at::Tensor place =
        part_gradients_of(context, "gradients").place(context->saved_data["number"].toInt(), gradients[0].options());
    place.copy_(gradients[0]);
    return {place, {}, {}};
  }
};

/// [E, ...] into its E parts; the gradient is the whole that the parts' nodes have filled, with copies of what lies
/// elsewhere.
class StackParts : public torch::autograd::Function<StackParts> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& stacked,
                               const c10::intrusive_ptr<PartGradients>& gradients) {
    context->saved_data["gradients"] = c10::IValue::make_capsule(gradients);
    context->set_materialize_grads(false);
    return stacked.detach().unbind();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    PartGradients& parts = part_gradients_of(context, "gradients");
    const at::Tensor whole = std::exchange(parts.whole, at::Tensor());
    const auto defined = std::ranges::find_if(gradients, [](const at::Tensor& one) { return one.defined(); });
    if (defined == gradients.end()) return {at::Tensor(), at::Tensor()};
    if (at::GradMode::is_enabled() || !whole.defined()) {
      variable_list all;
      for (const at::Tensor& one : gradients) all.push_back(one.defined() ? one : at::zeros_like(*defined));
      return {at::stack(all), at::Tensor()};
    }
    for (std::size_t number = 0; number < gradients.size(); ++number) {
      const at::Tensor place = whole.select(0, static_cast<std::int64_t>(number));
      if (!gradients[number].defined()) {
        place.zero_();
      } else if (gradients[number].const_data_ptr() != place.const_data_ptr()) {
        place.copy_(gradients[number]);
      }
    }
    return {whole, at::Tensor()};
  }
};

/// x times the matrix of one expert. Its gradients are written where they stay, so each part is used by one of these.
class PlacedProduct : public torch::autograd::Function<PlacedProduct> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& matrix,
                            const std::optional<at::Tensor>& bias, std::int64_t number,
                            const c10::intrusive_ptr<PartGradients>& of_matrix,
                            const c10::intrusive_ptr<PartGradients>& of_bias) {
    context->save_for_backward({x, matrix});
    context->saved_data["number"] = number;
    context->saved_data["matrix"] = c10::IValue::make_capsule(of_matrix);
    context->saved_data["bias"] = c10::IValue::make_capsule(of_bias);
    context->saved_data["has_bias"] = bias.has_value();
    return bias ? at::addmm(*bias, x, matrix.t()) : at::mm(x, matrix.t());
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& matrix = saved[1];
    const at::Tensor& gradient = gradients[0];
    const bool has_bias = context->saved_data["has_bias"].toBool();
    const std::int64_t number = context->saved_data["number"].toInt();
    variable_list result(6);
    if (context->needs_input_grad(0)) result[0] = at::mm(gradient, matrix);
    if (at::GradMode::is_enabled()) {
      result[1] = at::mm(gradient.t(), x);
      if (has_bias) result[2] = gradient.sum(0);
      return result;
    }
    if (context->needs_input_grad(1)) {
      result[1] = part_gradients_of(context, "matrix").place(number, matrix.options());
      at::mm_out(result[1], gradient.t(), x);
    }
    if (has_bias && context->needs_input_grad(2)) {
      result[2] = part_gradients_of(context, "bias").place(number, gradient.options());
      at::sum_out(result[2], gradient, 0);
    }
    return result;
  }
};

}  // namespace

/// A stack in parts, and where their gradients go; no parts of an undefined one.
struct StackedParts {
  std::vector<at::Tensor> parts{};
  c10::intrusive_ptr<PartGradients> gradients = c10::make_intrusive<PartGradients>();
  std::vector<at::Tensor> placed{};

  explicit StackedParts(const at::Tensor& stacked) {
    if (!stacked.defined()) return;
    gradients->sizes = stacked.sizes().vec();
    const bool has_gradient = stacked.requires_grad() && at::GradMode::is_enabled();
    parts = has_gradient ? StackParts::apply(stacked, gradients) : stacked.unbind();
  }
};

ExpertMatrices::ExpertMatrices(const at::Tensor& weight, const at::Tensor& bias) {
  if (!weight.defined() || weight.dim() != 3)
    refuse_experts("", "weight", "these are no matrices of experts", "[experts, out, in]",
                   weight.defined() ? c10::str(weight.sizes()) : "an undefined tensor");
  if (bias.defined() && (bias.dim() != 2 || bias.size(0) != weight.size(0) || bias.size(1) != weight.size(1)))
    refuse_experts("", "bias", "this is not the bias of the experts",
                   c10::str("[", weight.size(0), ", ", weight.size(1), "]"), c10::str(bias.sizes()));
  weights_ = std::make_shared<StackedParts>(weight);
  biases_ = std::make_shared<StackedParts>(bias);
  used_.assign(static_cast<std::size_t>(weight.size(0)), false);
}

at::Tensor ExpertMatrices::linear(const at::Tensor& x, std::int64_t expert) {
  if (expert < 0 || expert >= static_cast<std::int64_t>(used_.size()))
    refuse_experts("", "expert", "there is no such expert", c10::str("0 to ", used_.size() - 1), c10::str(expert));
  const auto at = static_cast<std::size_t>(expert);
  if (used_[at])
    refuse_experts("", "expert", "the gradient of a matrix has one place", "one product an expert", "a second one");
  const at::Tensor& matrix = weights_->parts[at];
  if (!x.defined() || x.dim() != 2 || x.size(1) != matrix.size(1))
    refuse_experts("", "x", "these are not the rows of an expert", c10::str("[rows, ", matrix.size(1), "]"),
                   x.defined() ? c10::str(x.sizes()) : "an undefined tensor");
  used_[at] = true;
  const auto bias = biases_->parts.empty() ? std::nullopt : std::optional(biases_->parts[at]);
  if (at::autocast::is_autocast_enabled(x.device().type())) return at::linear(x, matrix, bias);
  if (x.scalar_type() != matrix.scalar_type())
    refuse_experts("", "x", "rows and matrices have other dtypes", c10::str(matrix.scalar_type()),
                   c10::str(x.scalar_type()));
  return PlacedProduct::apply(x, matrix, bias, expert, weights_->gradients, biases_->gradients);
}

ExpertParts::ExpertParts(const at::Tensor& stacked) {
  if (!stacked.defined() || stacked.dim() < 1)
    refuse_experts("", "stacked", "this is no stack of parts", "[experts, ...]",
                   stacked.defined() ? c10::str(stacked.sizes()) : "an undefined tensor");
  stack_ = std::make_shared<StackedParts>(stacked);
  stack_->placed.resize(stack_->parts.size());
}

at::Tensor ExpertParts::part(std::int64_t expert) {
  if (expert < 0 || expert >= static_cast<std::int64_t>(stack_->parts.size()))
    refuse_experts("", "expert", "there is no such expert", c10::str("0 to ", stack_->parts.size() - 1),
                   c10::str(expert));
  const auto at = static_cast<std::size_t>(expert);
  at::Tensor& placed = stack_->placed[at];  // one node a part: two would write to one place
  if (!placed.defined()) {
    const at::Tensor& part = stack_->parts[at];
    placed = part.requires_grad() ? PlacedPart::apply(part, expert, stack_->gradients) : part;
  }
  return placed;
}

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
  const auto added = bias.defined() ? std::optional(bias.to(dtype)) : std::nullopt;
  return GroupedProduct::apply(x.to(dtype).contiguous(), weight.to(dtype), added, rows);
}

}  // namespace zeroth::libtorch
