// Calls between ranks inside a model: they give autograd their gradient, which is a call between ranks, too.
//
//                      forward                         backward
//   copy_to_group      x                               sum of the gradients over the ranks     f of Megatron-LM
//   reduce_from_group  sum over the ranks              the gradient as it is                   g of Megatron-LM
//   split_to_group     own slice of a dim              all_gather along the dim
//   gather_from_group  all_gather along a dim          own slice
//   all_reduce         sum over the ranks              sum over the ranks                      } true transposes: for
//   all_gather         slices of all ranks             reduce_scatter along the dim            } gradients that are
//   reduce_scatter     own slice of the sum            all_gather along the dim                } each rank's own part
//   all_to_all         slices to and from all ranks    the reverse all_to_all
//   ring_shift         tensors of rank - by            gradients to rank - by
//
// The first four are for values that all ranks of the group have alike: their gradients are alike, too. The others are
// for values that differ from rank to rank.
//
// All ranks of the group make the same calls in the same order, forward and backward: with the same dtype, with shapes
// that differ along the split dims only, and with requires_grad alike on all ranks (it is compared). Otherwise all
// ranks get kMismatch, which names the call. Calls block until this rank has its result, at most as long as the group's
// deadline, and throw the errors of CommBackend::submit(). A group of one rank makes no call and returns `x` itself.
//
// x: a dense tensor of the CPU or of a CUDA device (it goes through CPU memory), contiguous or not, of float64,
// float32, bfloat16, float16, int64, int32, uint8 (no sums of it). Else kUsage with call and argument. Results are
// contiguous and own their memory, but for copy_to_group(), whose result is x's memory: writing to it in place is an
// error of torch's. Sums are formed in rank order, inside nodes first; 16-bit values in float32 with one rounding at
// the end. So results do not depend on timing.
//
// Bytes received by this rank for S bytes of the whole tensor and P ranks: CommBackend::submit(); all_to_all S (P-1)/P,
// ring_shift the bytes of the tensors. Nothing is saved for backward but sizes, so they may stand inside checkpointed
// regions. Gradients of gradients are the same calls.
//
// `dim`, `split_dim`, `concat_dim` count from the end if negative. `sizes`: how many indices along the dim each rank
// has, in rank order. slice_sizes() (zeroth/parallel/slices.h) makes them as equal as can be.
//
// Ref: Shoeybi et al. 2019, "Megatron-LM", section 3 (f and g). Jacobs et al. 2023, "DeepSpeed Ulysses" (all_to_all of
// sequence and heads).
#pragma once

#include <zeroth/libtorch/rank_group.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace zeroth::libtorch {

using SliceSizes = std::optional<std::vector<std::int64_t>>;

[[nodiscard]] at::Tensor copy_to_group(const at::Tensor& x, const RankGroup& group);
[[nodiscard]] at::Tensor reduce_from_group(const at::Tensor& x, const RankGroup& group);
/// Without `sizes`: slice_sizes() of the dim.
[[nodiscard]] at::Tensor split_to_group(const at::Tensor& x, std::int64_t dim, const RankGroup& group,
                                        const SliceSizes& sizes = {});
/// Without `sizes` all ranks have as many indices along the dim as this one.
[[nodiscard]] at::Tensor gather_from_group(const at::Tensor& x, std::int64_t dim, const RankGroup& group,
                                           const SliceSizes& sizes = {});

[[nodiscard]] at::Tensor all_reduce(const at::Tensor& x, const RankGroup& group);
/// Without `sizes` all ranks have as many indices along the dim as this one.
[[nodiscard]] at::Tensor all_gather(const at::Tensor& x, std::int64_t dim, const RankGroup& group,
                                    const SliceSizes& sizes = {});
/// Without `sizes`: slice_sizes() of the dim.
[[nodiscard]] at::Tensor reduce_scatter(const at::Tensor& x, std::int64_t dim, const RankGroup& group,
                                        const SliceSizes& sizes = {});

/// Cuts x along split_dim, sends slice r to rank r, and joins what comes from the ranks along concat_dim in rank order.
/// split_sizes[r]: indices along split_dim for rank r; without it slice_sizes(). concat_sizes[r]: indices along
/// concat_dim that come from rank r; without it, all ranks have tensors of x's shape. If the dims differ, split_sizes
/// are the same on all ranks, and concat_sizes are what the ranks have along concat_dim. If the dim is one, ranks may
/// have any sizes (tokens for experts), which they have told each other before: then both lists are needed.
[[nodiscard]] at::Tensor all_to_all(const at::Tensor& x, std::int64_t split_dim, std::int64_t concat_dim,
                                    const RankGroup& group, const SliceSizes& split_sizes = {},
                                    const SliceSizes& concat_sizes = {});

/// Sends the tensors to rank + by and returns those of rank - by, around the ring, in one batch of messages. All ranks
/// have tensors of the same shapes. `by` may be negative.
[[nodiscard]] std::vector<at::Tensor> ring_shift(const std::vector<at::Tensor>& tensors, const RankGroup& group,
                                                 int by = 1);

}  // namespace zeroth::libtorch
