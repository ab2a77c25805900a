// What a step has gathered between its micro-steps, as a checkpoint keeps it.
//
// A save between two micro-steps writes, besides the states of the engine: sums over the ranks so far, by name and
// element ("blocks.0.weight/step_sum", or "step_sum@<group>" where ranks sum in sub-groups), and gradients that a rank
// has not given to any sum yet ("step_gradient@<rank>", ReductionPolicy::kPerStep). Only as many ranks go on from it.
#pragma once

#include "engine/shard_group.h"
#include "engine/state_pieces.h"

#include <zeroth/engine/engine.h>

#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

inline constexpr std::string_view kStepSum = "step_sum";
inline constexpr std::string_view kStepGradient = "step_gradient";

/// Of a manifest, and of what all ranks must have alike to go on.
struct Accumulation {
  int micro_step = 0;  ///< micro-steps that have ended; 0: none, and nothing else is set
  int micro_steps = 1;
  std::string policy{};
  std::vector<int> gradient_degrees{};  ///< of each shard group
  std::vector<std::string> has_grad{};  ///< parameters with a gradient on any rank

  [[nodiscard]] bool fits(const Accumulation& other) const {
    return micro_steps == other.micro_steps && policy == other.policy && gradient_degrees == other.gradient_degrees;
  }
};

/// JSON; "" between steps.
[[nodiscard]] std::string text_of(const Accumulation& accumulation);
/// `where`: the checkpoint, for errors. Throws kCheckpoint.
[[nodiscard]] Accumulation accumulation_of(const std::string& text, const std::string& where);

/// The name of the sums that a rank of the group forms.
[[nodiscard]] std::string step_sum_name(ShardGroup& group);
/// The parts that this rank has, after GradientStore::complete_backwards(), with the group's numbers of parameters.
[[nodiscard]] std::vector<StatePiece> step_pieces(ShardGroup& group, int job_rank);

}  // namespace zeroth
