// Loads of experts that even out: a loss of each sequence, and a bias of the choice that needs no loss.
//
// T tokens, E experts, k choices. Errors are kUsage with the argument.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace zeroth::libtorch {

/// mean over sequences of sum_i f_i P_i, a scalar of the scores' dtype. Of a sequence of L tokens:
///   f_i = E / (k L) * its choices of expert i          without a gradient
///   P_i = 1 / L * sum_t s_ti / sum_j s_tj              affinities of a token, normalised
/// 1 for a perfect balance, E / k where all tokens choose the same experts with all of their affinity. scores: [T, E],
/// above 0, of softmax or sigmoid. experts: [T, k], or -1 for none; the report counts the greatest scores without bias.
/// sequences: lengths, T in all, in the order of the tokens; those of length 0 are not counted. 0 without tokens.
/// Ref: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, eq. 17 to 20, without the factor alpha.
[[nodiscard]] at::Tensor sequence_balance_loss(const at::Tensor& scores, const at::Tensor& experts,
                                               const std::vector<std::int64_t>& sequences);

/// bias_i += rate * sign(mean(load) - load_i), in place: experts with less than their part are chosen more often. Once
/// a step, after its last micro-batch. bias: [E] of float32 or float64; 16 bits would lose steps of a usual rate.
/// load: choices of each expert in the step, over all ranks with other tokens (ExpertLoad::chosen()), so that the bias
/// is the same on all ranks. A load of zeros changes nothing.
/// Ref: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, algorithm 1.
void update_balance_bias(const at::Tensor& bias, const std::vector<std::int64_t>& load, double rate);

}  // namespace zeroth::libtorch
