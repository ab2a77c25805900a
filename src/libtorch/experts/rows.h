// Rows of tokens to the slots of their experts and back, known to autograd.
//
//   take_rows      out[s] = x[source_of[s] / k]                                  [T, D] -> [S, D]
//   sum_rows       out[t] = sum over j of weights[t, j] * y[slot_of[t, j]]       [S, D] -> [T, D]
//   reorder_rows   out[r] = x[source_of[r]], a permutation                       [R, D] -> [R, D]
//
// T tokens, k choices, S slots. An entry is t * k + j. slot_of [T, k] has the slot of each entry, -1: none; source_of
// [S] has the entry of each slot: they are each other's reverse, of int32, contiguous, on the device of the rows.
//
// Gradients are the same three: that of take_rows is sum_rows with weights of 1, that of sum_rows for y is take_rows
// times the weights, and for weights[t, j] the product of the row of out's gradient with y[slot_of[t, j]]. A gradient
// of a gradient is that of the torch operators with which the first one is then formed. Saved for backward: indices, of
// sum_rows also the weights, and y where the weights have a gradient.
//
// On the CPU the kernels of kernels/moe/permute.h compute, on torch's threads: 16-bit rows in float32 with one
// rounding, and a token's sum is in the order of its choices, whatever the slots. Elsewhere, and for rows that are not
// floating or k above 64, torch's operators do: the grids of permute.h are in the module of an engine's device
// (compute/cuda_kernels.h), which is bound to the engine's streams, while a layer runs on those of torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace zeroth::libtorch {

/// Choices in the order of (expert, token, choice).
struct ChoiceSlots {
  at::Tensor source_of{};              ///< [S]
  at::Tensor slot_of{};                ///< [T, k]
  std::vector<std::int64_t> counts{};  ///< rows of each expert; their sum is S
};

/// experts: [T, k] of int64 on the CPU, contiguous. Throws kUsage with `who` for a choice that is neither an expert nor
/// -1, and for 2^31 choices or more.
[[nodiscard]] ChoiceSlots slots_of_choices(const at::Tensor& experts, std::int64_t num_experts, const std::string& who);

[[nodiscard]] at::Tensor take_rows(const at::Tensor& x, const at::Tensor& source_of, const at::Tensor& slot_of);
/// weights: floating; undefined: all 1. Returns y's dtype.
[[nodiscard]] at::Tensor sum_rows(const at::Tensor& y, const at::Tensor& weights, const at::Tensor& slot_of,
                                  const at::Tensor& source_of);
/// back: [R], the reverse of source_of.
[[nodiscard]] at::Tensor reorder_rows(const at::Tensor& x, const at::Tensor& source_of, const at::Tensor& back);

}  // namespace zeroth::libtorch
