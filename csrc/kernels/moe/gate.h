// The router of a mixture of experts: chooses k of E experts for each token, with their weights, and the sums of the
// losses that balance it; and its gradient.
//
// Of a token's logits l[E]:
//
//   softmax         s_e = exp(l_e - max l) / sum_i exp(l_i - max l)
//   sigmoid         s_e = 1 / (1 + exp(-l_e))
//   of the chosen   s as for softmax; the weights are a softmax of the chosen logits alone
//
//   key             s_e + bias_e (of the chosen: l_e + bias_e). The bias is for the choice only, never in a weight.
//   groups          n groups of E / n neighbours. A group counts its greatest key, or the sum of its two greatest.
//                   Only experts of the `kept_groups` best groups can be chosen.
//   chosen          the k greatest keys, the greatest first
//   weight_j        scale * s_j;  renormalized: scale * s_j / (s_0 + .. + s_(k-1) + 2^-66)
//                   of the chosen: scale * exp(l_j - m) / sum_i exp(l_i - m), with m the greatest chosen logit
//
// Of equal keys, and of equal groups, the lower index is first. In a row with a NaN, or whose greatest logit is
// infinite, nothing is known: scores and weights are NaN, and the choice is 0 .. k-1. A logit of -inf has the score 0.
//
// Sums over tokens, for the losses that the caller makes of them:
//
//   counts[e]       tokens that chose e: E * sum_e (counts_e / (T k)) * (score_sums_e / T) is the balance loss of
//                   Switch and GShard; with counts of all ranks that of "Demons in the Detail"
//   score_sums[e]   sum of s_e
//   z_sum           sum of log(sum_e exp(l_e))^2, of ST-MoE
//
// Each term of score_sums is rounded to a multiple of 2^-30, each of z_sum to one of 2^-16. So their additions in
// double are exact up to 2^23 tokens, or a z_sum of 2^37: the bits depend neither on the split into parts nor on the
// order of parts or ranks. A NaN makes a sum NaN.
//
// exp is a polynomial of degree 7 (float) or 13 (double) after a reduction by multiples of log 2, and 0 below e^-87 or
// e^-708: at most 2 units in the last place from the true value. Sums over experts are taken in 16 lanes: lane l adds
// the experts l, l + 16, ... in this order, then a_l += a_(l + 8), and so on with 4, 2, 1. So the bits do not depend on
// `isa`. Arithmetic is in float, for float64 logits in double. log is in double.
//
// Ref: Shazeer et al., ICLR 2017 (top-k); Lepikhin et al., GShard, ICLR 2021; Fedus et al., Switch, JMLR 2022; Zoph et
// al., ST-MoE, 2022, eq. 5 (z-loss); Jiang et al., Mixtral, 2024 (of the chosen); Wang et al., Auxiliary-Loss-Free Load
// Balancing, 2024 (bias); DeepSeek-V3, 2024, eq. 12 to 16 (sigmoid, groups).
//
// All run on the calling thread, for a range of tokens: any split into parts of tokens has the same bits. All throw
// Error{kUsage} for counts out of range, a dtype that is none of float64, float32, bfloat16 and float16, a bias that is
// not finite, or an unsupported isa.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {

inline constexpr std::int64_t kMostExperts = 1024;
inline constexpr std::int64_t kMostChosen = 64;

enum class GateScore : std::uint8_t { kSoftmax, kSigmoid, kSoftmaxOfChosen };
enum class GroupScore : std::uint8_t { kGreatest, kSumOfTwoGreatest };

/// How experts are chosen. The same for all tokens.
struct GateRule {
  std::int64_t experts = 1;  ///< E, 1 to 1024
  std::int64_t k = 1;        ///< 1 to 64, at most E
  GateScore score = GateScore::kSoftmax;
  bool renormalize = false;  ///< no effect on softmax of the chosen
  double scale = 1.0;        ///< finite; rounded to float unless the logits are double
  std::int64_t groups = 1;   ///< divides E
  std::int64_t kept_groups = 1;
  GroupScore group_score = GroupScore::kSumOfTwoGreatest;
};

struct GateArgs {
  GateRule rule{};
  const void* logits = nullptr;  ///< [tokens, E]
  DType dtype = DType::kFloat32;
  std::int64_t tokens = 0;
  const float* bias = nullptr;     ///< [E] or null
  std::int32_t* chosen = nullptr;  ///< [tokens, k]
  void* weights = nullptr;         ///< [tokens, k], float; double for float64 logits
  void* scores = nullptr;          ///< [tokens, E] of the type of the weights, or null
  std::int64_t* counts = nullptr;  ///< [E] or null; added to
  double* score_sums = nullptr;    ///< [E] or null; added to
  double* z_sum = nullptr;         ///< [1] or null; added to
};
void gate(const GateArgs& args, Isa isa);

struct GateBackwardArgs {
  GateRule rule{};
  const void* logits = nullptr;  ///< [tokens, E], as in gate()
  DType dtype = DType::kFloat32;
  std::int64_t tokens = 0;
  const std::int32_t* chosen = nullptr;  ///< [tokens, k] of gate()
  const void* d_weights = nullptr;       ///< [tokens, k] of the type of the weights, or null: zeros
  const double* d_score_sums = nullptr;  ///< [E] or null: zeros. Of the sums of scores: the balance loss
  double d_z_sum = 0.0;
  const void* d_scores = nullptr;  ///< [tokens, E] of the type of the weights, or null: zeros. Of the scores themselves
  void* d_logits = nullptr;        ///< [tokens, E] of the dtype of the logits; may be the logits
};
/// The gradient of the logits. The choice has none, nor have the counts and the bias. The rounding of the terms of sums
/// counts as the identity. A row of which nothing is known has NaN. Throws Error{kUsage} also for a chosen expert
/// outside [0, E), and names token and expert; then d_logits of this row and of later ones is undefined.
void gate_backward(const GateBackwardArgs& args, Isa isa);

}  // namespace zeroth::kernels
