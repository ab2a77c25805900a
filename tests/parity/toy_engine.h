// What tests of the engine on the toy model share.
#pragma once

#include "support/checkpoint_folder.h"
#include "support/toy_training.h"

#include <zeroth/base/error.h>

#include <gtest/gtest.h>

#include <cstddef>
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

inline void expect_planned_memory(const ToyOutcome& got, const std::string& where) {
  for (const MemoryReport& memory : got.memory)
    EXPECT_EQ(memory.measured_peak, memory.planned) << where << "\n" << to_text(memory);
}

/// Memory, and the bytes of the last step.
inline void expect_as_planned(const ToyOutcome& got, const std::string& where) {
  expect_planned_memory(got, where);
  for (std::size_t rank = 0; rank < got.planned_wire.size(); ++rank) {
    const WireBytes& planned = got.planned_wire[rank];
    EXPECT_EQ(got.reduce_bytes[rank], planned.reduce_gradients) << where << " rank " << rank;
    EXPECT_EQ(got.gather_bytes[rank], planned.gather_parameters + planned.publish_parameters + planned.gather_gradients)
        << where << " rank " << rank;
  }
}

/// `whole` is saved to `folder` after step `saved`; `resumed`, from other initial values, goes on from there to the
/// same values. Returns what was resumed.
inline ToyTraining expect_goes_on(ToyTraining whole, ToyTraining resumed, int saved, const CheckpointFolder& folder) {
  whole.after_step = [&folder, saved](Engine& engine, ToyModel&, const StepResult& step) {
    if (step.step == saved) (void)engine.save(folder.text());
  };
  const ToyOutcome expected = train_toy(whole);
  resumed.model_seed = 99;
  resumed.first_step = saved;
  resumed.at_start = [&folder](Engine& engine, ToyModel&) { (void)engine.load(folder.text()); };
  EXPECT_EQ(train_toy(resumed).values, expected.values) << "saved after " << saved;
  return resumed;
}

}  // namespace zeroth::test
