// Layers whose matrices the ranks of a group share, and the loss over a vocabulary that they share.
//
//   x                         whole, alike on all ranks
//   ColumnLinear   x W_r^T    rank r has rows r of W [out, in]: its own outputs
//   gelu, heads               on own values
//   RowLinear      y_r V_r^T  rank r has columns r of V: its part of a sum, which reduce_from_group() makes whole
//
// A pair makes two all_reduces of its output's size: one in forward (of RowLinear), one in backward (of ColumnLinear,
// for the gradient of x). With a sequence dim (LinearCut::sequence_dim) x and the output are slices of that dim: the
// pair makes an all_gather and a reduce_scatter in forward, and the two again in backward. What stands between two
// pairs (norms, dropout) then works on slices; the gradients of its parameters, as of RowLinear's bias, are parts,
// which the ranks add up (ParameterBox, axes.summed).
//
// Slices of features and of the vocabulary are slice_sizes() of the whole. Gradients are those of one process. Calls
// block, and throw what collectives.h says; other errors are kUsage with the argument.
//
// Ref: Shoeybi et al. 2019, "Megatron-LM", section 3. Korthikanti et al. 2022, "Reducing Activation Recomputation in
// Large Transformer Models", section 4.2.2 (sequence dim).
#pragma once

#include <zeroth/libtorch/collectives.h>
#include <zeroth/libtorch/parameter_box.h>
#include <zeroth/libtorch/rank_group.h>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

/// How a linear layer is shared.
struct LinearCut {
  std::string axis = "tp";  ///< of the mesh, whose ranks the group is; for boxes()
  /// ColumnLinear: so many equal blocks of the outputs, each of which the ranks share: query, key and value in one
  /// matrix. Divides the outputs; not with gather_output.
  int parts = 1;
  /// ColumnLinear: the output is gathered, and made for values that all ranks compute alike.
  bool gather_output = false;
  /// RowLinear: x is whole, and each rank takes its slice of the features.
  bool input_is_whole = false;
  /// ColumnLinear: x is a slice of this dim, which is gathered. RowLinear: the output is one, of the sum.
  std::optional<std::int64_t> sequence_dim{};
  /// ColumnLinear with a sequence dim: the gathered x is not kept for backward, but gathered again there.
  bool gathers_again = false;
  /// Of the slices of sequence_dim. Without it: ColumnLinear, all as on this rank; RowLinear, slice_sizes().
  SliceSizes sequence_sizes{};
};

/// Sizes of the whole layer.
struct LinearSizes {
  std::int64_t in_features = 0;
  std::int64_t out_features = 0;
  bool bias = true;
  at::ScalarType dtype = at::kFloat;
};

/// linear(all_gather(x, dim), weight, bias), of which only the own slice of x is kept for backward, which gathers it
/// again for the gradient of the weight: memory of S/n bytes instead of S for S (n-1)/n bytes more on the wire. x: a
/// slice of `dim`, one before the last; weight: [own features, features]; bias: [own features] or undefined. `sizes`:
/// as in all_gather(). The gradient of x is that of all_gather(). It has no gradient of its own.
[[nodiscard]] at::Tensor gathered_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                         std::int64_t dim, const RankGroup& group, const SliceSizes& sizes = {});

/// Each rank computes a part of the outputs.
class ColumnLinearImpl : public torch::nn::Module, public SplitModule {
 public:
  /// Draws the whole layer as torch::nn::Linear does, from torch's generator, and keeps its own part: with one seed all
  /// ranks have parts of the same layer.
  ColumnLinearImpl(const LinearSizes& sizes, RankGroup group, LinearCut cut = {});
  /// Copies its part of a whole layer: weight [out_features, in_features], bias [out_features] or undefined.
  ColumnLinearImpl(const at::Tensor& weight, const at::Tensor& bias, RankGroup group, LinearCut cut = {});

  /// x: [..., in_features]; returns [..., own features], or [..., out_features] with gather_output.
  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const;
  [[nodiscard]] std::vector<std::pair<std::string, ParameterBox>> boxes() const override;

  at::Tensor weight{};  ///< [own features, in_features], block after block
  at::Tensor bias{};    ///< [own features], or undefined

 private:
  void take(const at::Tensor& whole_weight, const at::Tensor& whole_bias);
  RankGroup group_;
  LinearCut cut_;
  std::vector<std::int64_t> features_{};  ///< of each rank, of a block
};
TORCH_MODULE(ColumnLinear);

/// Each rank takes a part of the inputs and computes a part of the sum. The bias is added once, after the sum.
class RowLinearImpl : public torch::nn::Module, public SplitModule {
 public:
  /// As ColumnLinearImpl's; the bias is the whole one on every rank.
  RowLinearImpl(const LinearSizes& sizes, RankGroup group, LinearCut cut = {});
  RowLinearImpl(const at::Tensor& weight, const at::Tensor& bias, RankGroup group, LinearCut cut = {});

  /// x: [..., own features], or [..., in_features] with input_is_whole; returns [..., out_features].
  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const;
  [[nodiscard]] std::vector<std::pair<std::string, ParameterBox>> boxes() const override;

  at::Tensor weight{};  ///< [out_features, own features]
  at::Tensor bias{};    ///< [out_features], or undefined

 private:
  void take(const at::Tensor& whole_weight, const at::Tensor& whole_bias);
  RankGroup group_;
  LinearCut cut_;
  std::vector<std::int64_t> features_{};
};
TORCH_MODULE(RowLinear);

struct EmbeddingSizes {
  std::int64_t vocabulary = 0;
  std::int64_t features = 0;
  at::ScalarType dtype = at::kFloat;
};

/// Each rank has the rows of a part of the vocabulary. Of the cut, `axis` and the sequence dim (of the result) count.
class VocabEmbeddingImpl : public torch::nn::Module, public SplitModule {
 public:
  /// Draws the whole table as torch::nn::Embedding does, and keeps its own rows.
  VocabEmbeddingImpl(const EmbeddingSizes& sizes, RankGroup group, LinearCut cut = {});
  /// Copies its rows of a whole table [vocabulary, features].
  VocabEmbeddingImpl(const at::Tensor& weight, RankGroup group, LinearCut cut = {});

  /// indices: [...] of int64 or int32, the same on all ranks; returns [..., features]. Throws kUsage for an index
  /// outside the vocabulary.
  [[nodiscard]] at::Tensor forward(const at::Tensor& indices) const;
  [[nodiscard]] std::vector<std::pair<std::string, ParameterBox>> boxes() const override;

  at::Tensor weight{};  ///< [own rows, features]

 private:
  RankGroup group_;
  LinearCut cut_;
  std::vector<std::int64_t> rows_{};  ///< of each rank
};
TORCH_MODULE(VocabEmbedding);

enum class LossReduction : std::uint8_t { kMean, kSum, kNone };

struct VocabLossOptions {
  std::int64_t ignore_index = -100;  ///< targets that do not count
  LossReduction reduction = LossReduction::kMean;
  SliceSizes vocab_sizes{};  ///< of the ranks; without it all have as many logits as this one
};

/// Cross entropy of logits that the ranks share by the vocabulary. local_logits: [..., own vocabulary] floating;
/// targets: [...] int64, the same on all ranks. Returns the loss, alike on all ranks: a scalar, or [...] with kNone; of
/// the logits' dtype, float32 for 16-bit logits. As torch's, the mean over no target is NaN.
///
/// Logits never move: two all_reduces, of the maxima (1 number a target) and of the sums of exponentials and the
/// targets' logits (2 numbers). Computed in float32, for float64 in float64. The gradient, softmax - onehot on the own
/// logits, needs no call; it is made from the logits, of which no copy is saved. It has no gradient of its own.
/// Throws kUsage for targets outside the vocabulary and other shapes.
///
/// Ref: Megatron-LM, section 3, "parallel cross entropy".
[[nodiscard]] at::Tensor vocab_cross_entropy(const at::Tensor& local_logits, const at::Tensor& targets,
                                             const RankGroup& group, const VocabLossOptions& options = {});

}  // namespace zeroth::libtorch
