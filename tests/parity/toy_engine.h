// What tests of the engine on the toy model share.
#pragma once

#include "support/toy_training.h"

#include <zeroth/base/error.h>

#include <string>
#include <utility>

namespace zeroth::test {

[[nodiscard]] inline ToyTraining small(int zero_stage, int world) {
  ToyTraining training;
  training.model = {.width = 40, .blocks = 5};
  training.world = world;
  training.plan = zero_plan(zero_stage, {"dp"});
  return training;
}

/// Ranks, and whether they make collectives over messages.
inline constexpr std::pair<int, bool> kTransports[] = {{1, false}, {2, false}, {3, false},
                                                       {1, true},  {2, true},  {3, true}};

/// What the call throws.
template <class Call>
[[nodiscard]] std::string text_thrown_by(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

[[nodiscard]] inline std::string message_of(const ToyTraining& training) {
  return text_thrown_by([&training] { (void)train_toy(training); });
}

}  // namespace zeroth::test
