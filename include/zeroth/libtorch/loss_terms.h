// Terms of a loss that a program computes by itself, where the ranks of a group compute parts of one sample.
//
// An engine sums the gradients over such a group. So each rank owes its part of the gradient of every term, while the
// value of the term is whole on all of them.
#pragma once

#include <zeroth/libtorch/rank_group.h>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zeroth::libtorch {

/// A term that every rank of the group computes whole and alike, such as a penalty on weights: the same value, and its
/// gradient divided by the ranks. No call of the group. A group of one rank returns `term` itself.
/// Throws kUsage for what has no floating-point values.
[[nodiscard]] at::Tensor part_of_loss(const at::Tensor& term, const RankGroup& group);

/// A mean over elements, tokens for one, of which each rank has some. `sum`: over this rank's elements; `count`: of
/// them, from 0. Returns the mean over the elements of all ranks, on every rank, with the gradient of this rank's part;
/// 0 where there are none. A call of all ranks, blocking; wire: the count, and the sum.
/// Throws kUsage for a negative count and for what has no floating-point values.
[[nodiscard]] at::Tensor part_of_loss(const at::Tensor& sum, std::int64_t count, const RankGroup& group);

}  // namespace zeroth::libtorch
