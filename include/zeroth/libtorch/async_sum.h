// Sums over ranks that a model starts, computes beside, and takes later.
//
//   PendingSum sum = reduce_from_group_async(attention(x), tp);   // own part lies where the other ranks can read it
//   y = mlp(norm(x));                                             // reads x without the sum: Ladder-Residual
//   x = x + sum.wait();                                           // reads the parts of the others
//
// On ranks of one node that share memory (Capabilities::one_sided), a start copies the own part to memory of the group
// and returns; no rank waits for another before wait(), which adds the parts in rank order. So a wait lasts only while
// a rank has not started the same sum. The bits are those of reduce_from_group(). On other groups (several nodes, MPI,
// messages) the sum is made in wait(), by reduce_from_group()'s call. A group of one rank returns x itself.
//
// All ranks start the same sums in the same order, and take them in the same order among the calls of the group; a sum
// of another dtype or shape is kMismatch in wait(). Many may be under way; each needs memory of its own, which later
// sums use again, and which goes with the group. Where a PendingSum goes on all ranks without a wait(), as where a
// checkpointed region is recomputed in part, its memory is found when memory is needed.
//
// Ref: Zhang et al. 2025, "Ladder-Residual: parallelism-aware architecture for accelerating large model inference with
// communication overlapping". Pati et al. 2024, "T3: Transparent Tracking & Triggering for Fine-grained Overlap of
// Compute & Collectives" (chunked_linear_reduce() is its form in software).
#pragma once

#include <zeroth/libtorch/rank_group.h>

#include <ATen/core/Tensor.h>

#include <memory>

namespace zeroth::libtorch {

/// A sum under way. Copies are the same sum. One thread, that of the group's other calls.
class PendingSum {
 public:
  struct State;
  explicit PendingSum(std::shared_ptr<State> state) : state_(std::move(state)) {}
  /// Blocks until all ranks have started it, at most as long as the group's deadline. The sum, with x's gradient as it
  /// is; the same tensor each time. Throws what collectives.h says.
  [[nodiscard]] at::Tensor wait() const;

 private:
  std::shared_ptr<State> state_;
};

/// Starts reduce_from_group(x). x is read before this returns, or, where the sum is made in wait(), until then: do not
/// write to it. The first calls are collective: they share memory of x's size.
[[nodiscard]] PendingSum reduce_from_group_async(const at::Tensor& x, const RankGroup& group);

/// reduce_from_group(linear(x, weight)) + bias, in `chunks` pieces of the rows of x (all dims but the last): the sum of
/// a piece is under way while the next one is computed. x: [..., own features], weight: [out, own features], bias:
/// [out] or undefined; returns [..., out]. Gradients are those of reduce_from_group() and do not depend on the chunks.
///
/// The value depends on the chunks only as far as the product of a row depends on the number of rows beside it
/// (blocking in the library of matrices): by at most 2 k eps sum |x| |w| of k = own features terms on each rank, and
/// not at all where sums are exact. Throws kUsage for chunks below 1; more chunks than rows are as many as rows.
[[nodiscard]] at::Tensor chunked_linear_reduce(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                               int chunks, const RankGroup& group);

}  // namespace zeroth::libtorch
