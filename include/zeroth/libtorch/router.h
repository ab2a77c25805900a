// Which experts a token goes to, and with what weight.
//
//   scores    softmax(logits) over the experts, or sigmoid(logits)
//   choice    the k greatest of scores + bias, of equal ones those of lower number; of the groups that are kept
//   weights   scores of the chosen, [divided by their sum,] times a factor
//
// T tokens, E experts, k choices. Scores are formed in float32, in float64 for float64 logits. The choice has no
// gradient; weights and scores have.
//
// On the CPU kernels compute (kernels/moe/gate.h), on torch's threads, for up to 1,024 experts, 64 choices and a finite
// bias of float32 or less; elsewhere torch's operators. A row of logits with a NaN, or whose greatest is infinite,
// gives NaN. Gradients of gradients are those of the operators. Ref: Shazeer et al., "Outrageously Large Neural
// Networks", 2017 (top-k); DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, eq. 12 to 16 (sigmoid, bias for the
// choice only, groups).
#pragma once

#include <zeroth/libtorch/rank_group.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace zeroth::libtorch {

enum class RouterScore : std::uint8_t { kSoftmax, kSigmoid };

struct RouterOptions {
  std::int64_t choices = 2;  ///< k
  RouterScore score = RouterScore::kSoftmax;
  bool renormalize = true;       ///< the weights of a token sum to `scale`
  double scale = 1.0;            ///< of the weights
  at::Tensor bias{};             ///< [E] or undefined: added to scores for the choice only
  std::int64_t groups = 1;       ///< equal blocks of experts
  std::int64_t groups_kept = 1;  ///< those with the greatest sum of their two best scores
};

struct Routing {
  at::Tensor experts{};  ///< [T, k] of int64; a token's in falling order of what they were chosen by
  at::Tensor weights{};  ///< [T, k]
  at::Tensor scores{};   ///< [T, E]
};

/// logits: [T, E], T from 0. Throws kUsage for options that do not fit E.
[[nodiscard]] Routing route(const at::Tensor& logits, const RouterOptions& options);

/// Which of an expert's choices stay where there are more than it takes.
enum class KeepBy : std::uint8_t {
  kPosition,  ///< the first choices of all tokens before the second ones, and of these the earlier tokens
  kWeight,    ///< those of greater weight, of equal ones as kPosition
  kDraw,      ///< a draw from the seed, which is the same for all tokens: random token selection
};

/// Rows that one expert takes of T tokens of a rank: max(least, ceil(factor k T / E)). Throws kUsage for factor <= 0.
/// Ref: GShard, section 2.2; DeepSpeed's capacity_factor and min_capacity.
[[nodiscard]] std::int64_t expert_capacity(std::int64_t tokens, std::int64_t num_experts, std::int64_t choices,
                                           double factor, std::int64_t least);

/// `experts` [T, k] with -1 for choices beyond `capacity` choices of an expert. weights: [T, k]. The same seed, tokens
/// and choices give the same result on every machine. Throws kUsage for a capacity below 0.
/// Capacities go by the kernel dispatch_keep() (kernels/moe/dispatch.h), which has the formula of the draw; k is at
/// most 64, and there are below 2^31 choices.
[[nodiscard]] at::Tensor keep_within(const at::Tensor& experts, const at::Tensor& weights, std::int64_t num_experts,
                                     std::int64_t capacity, KeepBy by = KeepBy::kPosition, std::uint64_t seed = 0);

/// How the tokens of a step spread over the experts of one layer, on all ranks with tokens of their own.
class ExpertLoad {
 public:
  explicit ExpertLoad(std::int64_t num_experts) : chosen_(static_cast<std::size_t>(num_experts), 0) {}

  /// Forgets the micro-batches so far.
  void begin_step();
  /// Adds a micro-batch: its choices before any was dropped. `groups`: ranks with other tokens, axis by axis of the
  /// mesh; all of them make the call, with one sum of E + 1 numbers an axis. Blocks.
  void add(const at::Tensor& experts, const std::vector<RankGroup>& groups);
  /// E sum_i f_i p_i, a scalar of the scores' dtype: f_i, the choices of expert i in the micro-batches so far, over all
  /// ranks, for each token and choice; p_i, the mean score of expert i over the tokens of the last micro-batch. A rank
  /// adds its tokens' part of p_i, times the ranks: the mean over ranks is the loss, also where they have other numbers
  /// of tokens. f has no gradient. 1 for a perfect balance, E where one expert has all. scores: [T, E] of that
  /// micro-batch, of softmax. Ref: Qiu et al., "Demons in the Detail: On Implementing Load Balancing Loss for Training
  /// Specialized Mixture-of-Expert Models", 2025, eq. 4; Fedus et al., "Switch Transformers", 2021, eq. 4.
  [[nodiscard]] at::Tensor balance_loss(const at::Tensor& scores) const;

  /// Choices of each expert in the step so far, over all ranks.
  [[nodiscard]] const std::vector<std::int64_t>& chosen() const { return chosen_; }
  /// Tokens of the last micro-batch, over all ranks.
  [[nodiscard]] std::int64_t tokens() const { return tokens_; }

 private:
  std::vector<std::int64_t> chosen_;
  std::int64_t tokens_ = 0;
  std::int64_t ranks_ = 1;
};

/// mean over tokens of logsumexp(logits)^2. logits: [T, E]; 0 without tokens. Ref: Zoph et al., "ST-MoE", 2022, eq. 5.
[[nodiscard]] at::Tensor router_z_loss(const at::Tensor& logits);

}  // namespace zeroth::libtorch
