// Calls of a RankGroup with tensors, without autograd: layout of slices along any dim, errors that name the call.
#pragma once

#include <zeroth/comm/pending_points.h>
#include <zeroth/libtorch/collectives.h>
#include <zeroth/libtorch/rank_group.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::libtorch {

using SizeSpan = std::span<const std::int64_t>;
[[nodiscard]] std::int64_t sum_of_sizes(SizeSpan sizes);

/// The user's call that an exchange belongs to; for tags and errors.
struct CallName {
  const char* call = "";                   ///< "all_gather"
  std::uint32_t number = 0;                ///< of the call, below 128
  bool is_backward = false;                ///< it carries gradients
  bool has_grad = false;                   ///< a backward will follow, on all ranks or on none
  const char* uneven = "";                 ///< the argument with the sizes of all slices, which was not given
  [[nodiscard]] std::string text() const;  ///< "all_gather, backward"
};

/// The call, where `argument` has the sizes of all slices.
[[nodiscard]] inline CallName with_sizes(CallName name, const SliceSizes& sizes, const char* argument) {
  if (!sizes) name.uneven = argument;
  return name;
}

/// Throws kUsage for `argument` of a call.
[[noreturn]] void refuse(const RankGroup& group, const CallName& name, std::string_view argument,
                         const std::string& message, std::string expected, std::string got, std::string hint = {});

/// Runs a call of the group with `x`: errors of the transport get the name of the call, and are thrown as the group's
/// Rethrow has them in backward; other ranks hear of any other exception.
void with_name_of(const RankGroup& group, const CallName& name, const at::Tensor& x, const std::function<void()>& call);

/// Refuses what ranks cannot exchange.
void require_exchangeable(const at::Tensor& x, const RankGroup& group, const CallName& name,
                          std::string_view argument = "x");
/// `dim` of a tensor, from 0. Refuses one that the tensor does not have.
[[nodiscard]] std::int64_t dim_of(const at::Tensor& x, std::int64_t dim, const RankGroup& group, const CallName& name,
                                  std::string_view argument = "dim");
/// Refuses sizes that are not one a rank, from 0.
void require_one_a_rank(const std::vector<std::int64_t>& sizes, const RankGroup& group, const CallName& name,
                        std::string_view argument);

/// Sizes that cut all `elements` indices of a dim; without `sizes` slice_sizes(). Refuses others.
[[nodiscard]] std::vector<std::int64_t> sizes_of_whole(std::int64_t elements, std::int64_t dim, const SliceSizes& sizes,
                                                       const RankGroup& group, const CallName& name,
                                                       std::string_view argument);
/// Sizes of which this rank's is that of x along `dim`; without `sizes` that of x for all. Refuses others.
[[nodiscard]] std::vector<std::int64_t> sizes_with_own(const at::Tensor& x, std::int64_t dim, const SliceSizes& sizes,
                                                       const RankGroup& group, const CallName& name,
                                                       std::string_view argument);

/// The calls. Arguments have been checked; results are new, contiguous tensors without a gradient. They block. Tensors
/// of a CUDA device go through memory of the host, and results are on that device.
[[nodiscard]] at::Tensor sum_over(const at::Tensor& x, const RankGroup& group, const CallName& name,
                                  ReduceOp op = ReduceOp::kSum);
[[nodiscard]] at::Tensor gather_along(const at::Tensor& x, std::int64_t dim, SizeSpan sizes, const RankGroup& group,
                                      const CallName& name);
[[nodiscard]] at::Tensor reduce_scatter_along(const at::Tensor& x, std::int64_t dim, SizeSpan sizes,
                                              const RankGroup& group, const CallName& name);
[[nodiscard]] at::Tensor exchange_along(const at::Tensor& x, std::int64_t split_dim, SizeSpan split_sizes,
                                        std::int64_t concat_dim, SizeSpan concat_sizes, const RankGroup& group,
                                        const CallName& name);
[[nodiscard]] std::vector<at::Tensor> shift_along_ring(const std::vector<at::Tensor>& tensors, int by,
                                                       const RankGroup& group, const CallName& name);

/// Rows of dim 0 of a tensor, for a rank or from it.
struct RowsOfRank {
  int rank = 0;
  std::int64_t first = 0;
  std::int64_t count = 0;
};
/// Starts a message for each run of rows; several for one rank come in their order. See start_rows_of_ranks().
[[nodiscard]] std::unique_ptr<PendingPoints> start_rows_between(const at::Tensor& sent,
                                                                std::span<const RowsOfRank> give,
                                                                const at::Tensor& taken,
                                                                std::span<const RowsOfRank> take,
                                                                const RankGroup& group, const CallName& name);
/// Starts messages with rows of dim 0 to and from the other ranks; rows for each rank and from each, in rank order. Own
/// rows are not moved. Memory of the host, contiguous, of one shape but for dim 0; it lives until the messages are
/// done. Null if there are none.
[[nodiscard]] std::unique_ptr<PendingPoints> start_rows_of_ranks(const at::Tensor& sent, SizeSpan given,
                                                                 const at::Tensor& taken, SizeSpan from,
                                                                 const RankGroup& group, const CallName& name);

/// Own part of a dim that is cut into `sizes`.
struct OwnPart {
  std::int64_t begin = 0;
  std::int64_t length = 0;
};
[[nodiscard]] OwnPart own_part(SizeSpan sizes, int rank);

}  // namespace zeroth::libtorch
