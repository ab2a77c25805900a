// Random programs of a model's own calls: sums, exchanges and messages in sub-groups, at random places of forward and
// backward, in one order on all ranks but in other places on each.
#pragma once

#include "support/toy_training.h"

#include <cstdint>
#include <string>

namespace zeroth::test {

/// Programs that are compared with one training.
inline constexpr std::uint64_t kProgramsOfAModel = 10;

/// A toy training at stage 0 without such calls, for the programs `seed` to seed + kProgramsOfAModel.
[[nodiscard]] ToyTraining training_of_programs(std::uint64_t seed);
/// Gives it the calls of a program, and a plan, a transport and an execution mode.
void add_calls(ToyTraining& training, std::uint64_t program);
/// For messages.
[[nodiscard]] std::string text_of(const ToyTraining& training);

}  // namespace zeroth::test
