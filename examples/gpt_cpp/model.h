// A decoder-only transformer for byte tokens: pre-norm RMSNorm, rotary positions, SwiGLU, tied embedding.
//
// Shape letters: B batch, T sequence, D model width, N heads, H head width (D / N), F hidden width of the
// MLP, V vocabulary. Every block is a Unit: the grain in which Zeroth gathers parameters and reduces
// gradients. Embedding and last norm belong to the root unit. Ranks may share the matrices (Gpt::share()): N, F and V
// are then this rank's. With experts (ModelOptions::experts) a token's MLP is the sum of its `choices`; ranks may have
// other experts (Gpt::share_experts()).
#pragma once

#include <zeroth/libtorch/engine.h>
#include <zeroth/libtorch/experts.h>
#include <zeroth/libtorch/parameter_box.h>
#include <zeroth/libtorch/pipeline_model.h>
#include <zeroth/libtorch/rank_group.h>
#include <zeroth/libtorch/tensor_parallel.h>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gpt {

struct ModelOptions {
  std::int64_t vocab = 256;
  std::int64_t layers = 4;
  std::int64_t d_model = 256;
  std::int64_t heads = 4;
  std::int64_t seq = 128;    ///< longest sequence
  std::int64_t experts = 0;  ///< of each block; 0: one MLP for all tokens
  std::int64_t choices = 2;  ///< experts of a token
  std::uint64_t seed = 0;    ///< of the initial values
  torch::Dtype dtype = torch::kFloat32;
};

/// Hidden width of the SwiGLU MLP: 8/3 of D, rounded to a multiple of 32, so that a block holds about 12 D^2
/// numbers.
[[nodiscard]] std::int64_t hidden_width(std::int64_t d_model);

using Boxes = std::vector<std::pair<std::string, zeroth::libtorch::ParameterBox>>;

/// A matrix without bias and without torch's own (slow) initialisation; `model.cpp` fills it.
class ProjectionImpl : public torch::nn::Module, public zeroth::libtorch::SplitModule {
 public:
  /// Weight [out, in]; initial standard deviation `deviation`.
  ProjectionImpl(std::int64_t in, std::int64_t out, double deviation, torch::Dtype dtype);
  torch::Tensor forward(const torch::Tensor& x);
  /// The ranks share the outputs, of each of `parts` equal blocks alike, or the inputs. Leaves this rank its part of
  /// the weight, in a new tensor.
  void share_outputs(const zeroth::libtorch::RankGroup& group, int parts);
  void share_inputs(const zeroth::libtorch::RankGroup& group);
  [[nodiscard]] Boxes boxes() const override;

  torch::Tensor weight{};
  double deviation;

 private:
  void take(const torch::Tensor& part);
  zeroth::libtorch::ColumnLinear column_{nullptr};
  zeroth::libtorch::RowLinear row_{nullptr};
};
TORCH_MODULE(Projection);

/// x / rms(x) * weight over the last dimension. Ref: Zhang, Sennrich, "Root Mean Square Layer Normalization",
/// 2019, eq. 4.
class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(std::int64_t width, torch::Dtype dtype);
  torch::Tensor forward(const torch::Tensor& x);

  torch::Tensor weight{};
};
TORCH_MODULE(RmsNorm);

/// Tables of rotary positions, shared by all blocks; not parameters.
/// Ref: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, eq. 34.
class Rotary {
 public:
  Rotary(std::int64_t head_width, std::int64_t seq, torch::Dtype dtype);
  /// Rotates the pairs (h, h + H/2) of x [B, T, 2, N, H] (queries and keys), in the dtype of x.
  [[nodiscard]] torch::Tensor rotate(const torch::Tensor& x_BT2NH) const;

 private:
  torch::Tensor cos_T11h_{};  // h = H / 2
  torch::Tensor sin_T11h_{};
};

/// How ranks share a sequence: each has a slice of it, and in attention a part of the heads of all of it.
/// Ref: Jacobs et al., "DeepSpeed Ulysses", 2023, section 3.
struct SharedSequence {
  zeroth::libtorch::RankGroup group;
  std::vector<std::int64_t> sizes{};  ///< of each rank, in the forward that runs
  [[nodiscard]] torch::Tensor own_slice(const torch::Tensor& x_BT) const;
};

/// Causal self-attention with queries, keys and values from one matrix.
class AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(const ModelOptions& options, std::shared_ptr<const Rotary> rotary);
  torch::Tensor forward(const torch::Tensor& x_BTD);
  void share(const zeroth::libtorch::RankGroup& group);
  void share_sequence(std::shared_ptr<const SharedSequence> sequence) { sequence_ = std::move(sequence); }

 private:
  std::int64_t head_width_;
  std::shared_ptr<const SharedSequence> sequence_{};
  std::shared_ptr<const Rotary> rotary_;
  Projection qkv_;
  Projection out_;
};
TORCH_MODULE(Attention);

/// down(silu(gate(x)) * up(x)). Ref: Shazeer, "GLU Variants Improve Transformer", 2020, eq. 6.
class MlpImpl : public torch::nn::Module {
 public:
  explicit MlpImpl(const ModelOptions& options);
  torch::Tensor forward(const torch::Tensor& x_BTD);
  void share(const zeroth::libtorch::RankGroup& group);

 private:
  Projection gate_up_;
  Projection down_;
};
TORCH_MODULE(Mlp);

/// A token's sum over the MLPs that the router chooses, of those of all experts.
/// Ref: Jiang et al., "Mixtral of Experts", 2024, section 2.1.
class MoeImpl : public torch::nn::Module {
 public:
  explicit MoeImpl(const ModelOptions& options);
  torch::Tensor forward(const torch::Tensor& x_BTD);
  void fill_experts(std::uint64_t seed, const std::string& name);
  void share_experts(const zeroth::libtorch::ExpertRanks& ranks) { experts_->share(ranks); }

 private:
  std::int64_t choices_;
  double down_deviation_;
  Projection router_;
  zeroth::libtorch::GatedExperts experts_;
};
TORCH_MODULE(Moe);

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(const ModelOptions& options, std::shared_ptr<const Rotary> rotary);
  torch::Tensor forward(const torch::Tensor& x_BTD);
  void share(const zeroth::libtorch::RankGroup& group);
  void share_sequence(std::shared_ptr<const SharedSequence> sequence) {
    attention_->share_sequence(std::move(sequence));
  }
  [[nodiscard]] Moe& moe() { return moe_; }  ///< null without experts

 private:
  RmsNorm attention_norm_;
  Attention attention_;
  RmsNorm mlp_norm_;
  Mlp mlp_{nullptr};  // this one or the next
  Moe moe_{nullptr};
};
TORCH_MODULE(Block);

class GptImpl : public torch::nn::Module, public zeroth::libtorch::SplitModule {
 public:
  /// Initial values are a function of `options.seed` and the name of the parameter's module only
  /// ("embedding", "blocks.0.attention.qkv"); no torch generator is touched.
  explicit GptImpl(const ModelOptions& options);
  /// @param x_BT int64 tokens. @param y_BT int64 next tokens, or undefined.
  /// @return mean cross entropy in nats (a scalar; fp32, or fp64 in an fp64 model), or without y the logits
  /// [B, T, V].
  torch::Tensor forward(const torch::Tensor& x_BT, const torch::Tensor& y_BT);

  /// The group's ranks share the heads, the hidden width and the vocabulary of a model that they have alike: each keeps
  /// its part. Four sums of [B, T, D] a block and step (two of them in backward); logits do not travel where there is
  /// a loss. forward() throws zeroth::Error kMismatch for ranks of the group with other x or y. Before the engine is
  /// made, once. A call of all of the group's ranks. Throws, with nothing changed, kModel for heads that do not divide
  /// by the ranks, and kMismatch for ranks with other weights.
  /// Ref: Shoeybi et al., "Megatron-LM", 2019, section 3.
  void share(const zeroth::libtorch::RankGroup& group);
  /// The group's ranks share each sequence; x and y are whole, and so are the loss and logits. Its gradient is this
  /// rank's part: zeroth.mesh.sp has the engine add them up. After share(), before the engine is made. Throws, with
  /// nothing changed, kUsage for more ranks than heads or tokens, and kMismatch for ranks with other weights.
  void share_sequence(const zeroth::libtorch::RankGroup& group);
  /// The ranks, along the axes of zeroth.experts.over, share the experts of a model that they have alike: each keeps
  /// its own, and tokens of all of them travel to it. Before the engine is made. Throws kUsage for fewer experts than
  /// ranks, and kMismatch for ranks with other weights.
  void share_experts(const zeroth::libtorch::ExpertRanks& ranks);
  /// The model for the stages of a pipeline: embedding, blocks, head with the embedding's weights. After share() and
  /// share_sequence(). A micro-batch has the inputs {x} and the targets {y}, or none for the logits. The model must
  /// outlive the layers.
  [[nodiscard]] std::vector<zeroth::libtorch::Layer> layers();
  [[nodiscard]] Boxes boxes() const override;
  /// Numbers of the whole model, also after share().
  [[nodiscard]] std::int64_t num_parameters() const { return num_parameters_; }

 private:
  void require_same_weights(const zeroth::libtorch::RankGroup& group, const std::string& shared) const;
  /// Before embed(), blocks and head() of a sample: how the ranks share this sequence.
  void set_slices(const torch::Tensor& x_BT) const;
  torch::Tensor embed(const torch::Tensor& x_BT);
  torch::Tensor head(const torch::Tensor& h_BTD, const torch::Tensor& y_BT);
  torch::Tensor loss_of(const torch::Tensor& logits_BTV, const torch::Tensor& y_BT);

  struct Vocabulary {
    zeroth::libtorch::RankGroup group;
    zeroth::libtorch::VocabEmbedding embedding;
    std::vector<std::int64_t> sizes{};  ///< of each rank
  };

  ModelOptions options_;
  std::int64_t num_parameters_ = 0;
  std::optional<Vocabulary> shared_{};
  std::shared_ptr<SharedSequence> sequence_{};
  bool shares_experts_ = false;  ///< ranks have others, on purpose
  torch::Tensor embedding_VD_{};
  torch::nn::ModuleList blocks_{};
  std::vector<zeroth::libtorch::Unit<Block>> units_{};
  RmsNorm last_norm_;
};
TORCH_MODULE(Gpt);

}  // namespace gpt
