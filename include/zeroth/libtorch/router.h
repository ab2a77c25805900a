// Which experts a token goes to, and with what weight.
//
//   scores    softmax(logits) over the experts, or sigmoid(logits)
//   choice    the k greatest of scores + bias, of equal ones those of lower number; of the groups that are kept
//   weights   scores of the chosen, [divided by their sum,] times a factor
//
// T tokens, E experts, k choices. Scores are formed in float32, in float64 for float64 logits. The choice has no
// gradient; weights and scores have. Ref: Shazeer et al., "Outrageously Large Neural Networks", 2017 (top-k);
// DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, eq. 12 to 16 (sigmoid, bias for the choice only, groups).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

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

}  // namespace zeroth::libtorch
