#include "libtorch/experts/rows.h"

#include "libtorch/experts/expert_call.h"
#include "libtorch/experts/torch_threads.h"

#include <kernels/moe/dispatch.h>
#include <kernels/moe/permute.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

namespace zeroth::libtorch {
namespace {

using RowsContext = torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kMostIndices = std::numeric_limits<std::int32_t>::max();

bool has_kernels(const at::Tensor& rows, std::int64_t choices) {
  return rows.is_cpu() && rows.layout() == at::kStrided && kernel_dtype(rows.scalar_type()) && choices <= 64 &&
         choices >= 1;
}

const void* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

std::int64_t row_bytes_of(const at::Tensor& rows) {
  return rows.size(1) * static_cast<std::int64_t>(rows.element_size());
}

/// out[s] = rows[source_of[s] / k], times weights[source_of[s]] where they are given.
at::Tensor permuted(const at::Tensor& given, const at::Tensor& source_of, std::int64_t choices,
                    const at::Tensor& weights = {}) {
  const at::Tensor rows = given.contiguous();
  at::Tensor out = at::empty({source_of.size(0), rows.size(1)}, rows.options());
  auto* const to = static_cast<char*>(out.data_ptr());
  const std::int64_t row_bytes = row_bytes_of(rows);
  const kernels::PermuteArgs whole{.in = rows.const_data_ptr(),
                                   .dtype = *kernel_dtype(rows.scalar_type()),
                                   .width = rows.size(1),
                                   .tokens = rows.size(0),
                                   .k = choices,
                                   .weights = data_or_null(weights)};
  const auto* const sources = source_of.const_data_ptr<std::int32_t>();
  for_parts(source_of.size(0), grain_of_rows(row_bytes), [&](std::int64_t begin, std::int64_t end) {
    kernels::PermuteArgs part = whole;
    part.out = to + begin * row_bytes;
    part.slots = end - begin;
    part.source_of = sources + begin;
    kernels::permute(part, kernels::best_isa());
  });
  return out;
}

/// Those of unpermute() for all tokens, without out.
kernels::UnpermuteArgs unpermute_args(const at::Tensor& rows, const at::Tensor& slot_of) {
  return {.in = rows.const_data_ptr(),
          .dtype = *kernel_dtype(rows.scalar_type()),
          .width = rows.size(1),
          .tokens = slot_of.size(0),
          .k = slot_of.size(1),
          .slots = rows.size(0),
          .slot_of = slot_of.const_data_ptr<std::int32_t>()};
}

at::Tensor unpermuted(const at::Tensor& given, const at::Tensor& slot_of, const at::Tensor& weights = {}) {
  const at::Tensor rows = given.contiguous();
  at::Tensor out = at::empty({slot_of.size(0), rows.size(1)}, rows.options());
  auto* const to = static_cast<char*>(out.data_ptr());
  const std::int64_t row_bytes = row_bytes_of(rows);
  const auto* const of_tokens = static_cast<const char*>(data_or_null(weights));
  const std::int64_t weight_bytes =
      weights.defined() ? slot_of.size(1) * static_cast<std::int64_t>(weights.element_size()) : 0;
  const kernels::UnpermuteArgs whole = unpermute_args(rows, slot_of);
  const std::int64_t grain = grain_of_rows(row_bytes * (1 + slot_of.size(1)));
  for_parts(slot_of.size(0), grain, [&](std::int64_t begin, std::int64_t end) {
    kernels::UnpermuteArgs part = whole;
    part.out = to + begin * row_bytes;
    part.tokens = end - begin;
    part.slot_of = whole.slot_of + begin * whole.k;
    part.weights = of_tokens == nullptr ? nullptr : of_tokens + begin * weight_bytes;
    kernels::unpermute(part, kernels::best_isa());
  });
  return out;
}

/// [T, k]: the products of rows [slots, D] with those of `gradient` [T, D].
at::Tensor weight_products(const at::Tensor& rows, const at::Tensor& slot_of, const at::Tensor& gradient) {
  at::Tensor out = at::empty(slot_of.sizes(), rows.options().dtype(weight_dtype(rows.scalar_type())));
  auto* const to = static_cast<char*>(out.data_ptr());
  const std::int64_t out_bytes = slot_of.size(1) * static_cast<std::int64_t>(out.element_size());
  const auto* const from = static_cast<const char*>(gradient.const_data_ptr());
  const std::int64_t row_bytes = row_bytes_of(rows);
  const kernels::UnpermuteArgs whole = unpermute_args(rows, slot_of);
  const std::int64_t grain = grain_of_rows(row_bytes * (1 + slot_of.size(1)));
  for_parts(slot_of.size(0), grain, [&](std::int64_t begin, std::int64_t end) {
    kernels::UnpermuteArgs part = whole;
    part.out = to + begin * out_bytes;
    part.tokens = end - begin;
    part.slot_of = whole.slot_of + begin * whole.k;
    part.d_out = from + begin * row_bytes;
    kernels::unpermute_weights(part, kernels::best_isa());
  });
  return out;
}

/// The number of the token of each slot.
at::Tensor tokens_of(const at::Tensor& source_of, std::int64_t choices) {
  return at::floor_divide(source_of.to(at::kLong), choices);
}

at::Tensor take_by_operators(const at::Tensor& x, const at::Tensor& source_of, const at::Tensor& slot_of) {
  return at::index_select(x, 0, tokens_of(source_of, slot_of.size(1)));
}

at::Tensor sum_by_operators(const at::Tensor& y, const at::Tensor& weights, const at::Tensor& slot_of) {
  // No row: then no choice has one, and there is nothing to select.
  const at::Tensor rows =
      y.size(0) > 0 ? y : at::zeros({1, y.size(1)}, y.options()) + y.sum(0, /*keepdim=*/true).to(y.scalar_type());
  const at::Tensor none = slot_of.lt(0).unsqueeze(-1);
  const at::Tensor of_choices = at::index_select(rows, 0, slot_of.clamp_min(0).flatten().to(at::kLong))
                                    .view({slot_of.size(0), slot_of.size(1), y.size(1)})
                                    .masked_fill(none, 0);
  const at::Tensor scaled = weights.defined() ? of_choices * weights.unsqueeze(-1).to(y.scalar_type()) : of_choices;
  return scaled.sum(1).to(y.scalar_type());
}

class TakenRows : public torch::autograd::Function<TakenRows> {
 public:
  static at::Tensor forward(RowsContext* context, const at::Tensor& x, const at::Tensor& source_of,
                            const at::Tensor& slot_of) {
    context->save_for_backward({source_of, slot_of});
    return permuted(x, source_of, slot_of.size(1));
  }
  static variable_list backward(RowsContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    return {sum_rows(gradients[0], {}, saved[1], saved[0]), {}, {}};
  }
};

class SummedRows : public torch::autograd::Function<SummedRows> {
 public:
  static at::Tensor forward(RowsContext* context, const at::Tensor& y, const std::optional<at::Tensor>& given,
                            const at::Tensor& slot_of, const at::Tensor& source_of) {
    const at::Tensor weights = given.value_or(at::Tensor());
    const bool needs_rows = weights.defined() && weights.requires_grad();
    context->save_for_backward({needs_rows ? y : at::Tensor(), weights, slot_of, source_of});
    return unpermuted(y, slot_of, scales(y, weights));
  }
  static variable_list backward(RowsContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& y = saved[0];
    const at::Tensor& weights = saved[1];
    const at::Tensor& slot_of = saved[2];
    const at::Tensor& source_of = saved[3];
    const at::Tensor gradient = gradients[0].contiguous();
    variable_list result(4);
    if (at::GradMode::is_enabled()) {
      const at::Tensor taken = take_rows(gradient, source_of, slot_of);
      const at::Tensor entries = source_of.to(at::kLong);
      result[0] = taken;
      if (weights.defined())
        result[0] = taken * weights.flatten().index_select(0, entries).unsqueeze(-1).to(taken.scalar_type());
      if (y.defined()) {
        const at::Tensor products = (taken * y).sum(1).to(weights.scalar_type());
        result[1] = at::zeros({weights.numel()}, weights.options()).scatter(0, entries, products).view(weights.sizes());
      }
      return result;
    }
    if (context->needs_input_grad(0))
      result[0] = permuted(gradient, source_of, slot_of.size(1), scales(gradient, weights));
    if (y.defined()) result[1] = weight_products(y.contiguous(), slot_of, gradient).to(weights.scalar_type());
    return result;
  }

 private:
  static at::Tensor scales(const at::Tensor& rows, const at::Tensor& weights) {
    return weights.defined() ? weights.detach().to(weight_dtype(rows.scalar_type())).contiguous() : at::Tensor();
  }
};

class ReorderedRows : public torch::autograd::Function<ReorderedRows> {
 public:
  static at::Tensor forward(RowsContext* context, const at::Tensor& x, const at::Tensor& source_of,
                            const at::Tensor& back) {
    context->save_for_backward({source_of, back});
    return permuted(x, source_of, 1);
  }
  static variable_list backward(RowsContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    return {reorder_rows(gradients[0], saved[1], saved[0]), {}, {}};
  }
};

}  // namespace

ChoiceSlots slots_of_choices(const at::Tensor& experts, std::int64_t num_experts, const std::string& who) {
  const std::int64_t all = experts.numel();
  if (all >= kMostIndices)
    refuse_experts(who, "experts", "there are too many choices", c10::str("below ", kMostIndices), c10::str(all));
  ChoiceSlots slots;
  slots.counts = count_choices(experts, num_experts, who);
  const std::int64_t routed = std::accumulate(slots.counts.begin(), slots.counts.end(), std::int64_t{0});
  const at::Tensor chosen = experts.to(at::kInt);
  slots.slot_of = at::empty(experts.sizes(), at::kInt);
  slots.source_of = at::empty({routed}, at::kInt);
  std::vector<std::int64_t> counts(slots.counts.size());
  std::vector<std::int64_t> offsets(slots.counts.size() + 1);
  // Each choice is a token of one: the order is the same, and there may be any number of choices.
  kernels::DispatchArgs args{.chosen = chosen.const_data_ptr<std::int32_t>(),
                             .tokens = all,
                             .experts = num_experts,
                             .counts = counts.data(),
                             .offsets = offsets.data(),
                             .slot_of = slots.slot_of.data_ptr<std::int32_t>(),
                             .source_of = slots.source_of.data_ptr<std::int32_t>()};
  std::vector<std::int64_t> workspace(kernels::dispatch_workspace_bytes(args, num_experts) / sizeof(std::int64_t) + 1);
  args.workspace = workspace.data();
  kernels::dispatch(args);
  return slots;
}

at::Tensor take_rows(const at::Tensor& x, const at::Tensor& source_of, const at::Tensor& slot_of) {
  if (!has_kernels(x, slot_of.size(1))) return take_by_operators(x, source_of, slot_of);
  return TakenRows::apply(x, source_of, slot_of);
}

at::Tensor sum_rows(const at::Tensor& y, const at::Tensor& weights, const at::Tensor& slot_of,
                    const at::Tensor& source_of) {
  if (!has_kernels(y, slot_of.size(1))) return sum_by_operators(y, weights, slot_of);
  return SummedRows::apply(y, weights.defined() ? std::optional(weights) : std::nullopt, slot_of, source_of);
}

at::Tensor reorder_rows(const at::Tensor& x, const at::Tensor& source_of, const at::Tensor& back) {
  if (!has_kernels(x, 1)) return at::index_select(x, 0, source_of);
  return ReorderedRows::apply(x, source_of, back);
}

}  // namespace zeroth::libtorch
