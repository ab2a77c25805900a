// What the calls of experts share: errors, and choices that are checked and counted.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace zeroth::libtorch {

/// Throws kUsage for argument `which` of a call.
[[noreturn]] void refuse_experts(const std::string& who, const char* which, const std::string& message,
                                 std::string expected, std::string got);

/// How often each expert was chosen. chosen: [tokens, choices] of int64, contiguous, on the CPU. Throws kUsage with the
/// token for a choice that is neither an expert nor -1.
[[nodiscard]] std::vector<std::int64_t> count_choices(const at::Tensor& chosen, std::int64_t num_experts,
                                                      const std::string& who = {});

// The steps of route() by torch's operators.
/// The numbers of the `count` greatest of each row, of equal ones the lowest.
[[nodiscard]] at::Tensor greatest(const at::Tensor& values, std::int64_t count);
/// softmax, or sigmoid; of float32, of float64 for float64 logits.
[[nodiscard]] at::Tensor scores_by_operators(const at::Tensor& logits, bool sigmoid);
[[nodiscard]] at::Tensor weights_by_operators(const at::Tensor& scores, const at::Tensor& experts, bool renormalize,
                                              double scale);

}  // namespace zeroth::libtorch
