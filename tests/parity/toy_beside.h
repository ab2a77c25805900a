// Trainings of the toy model on a device of its own memory, as rows of factors: what rests on it, and what beside it.
#pragma once

#include "parity/toy_engine.h"
#include "support/covering_array.h"
#include "support/toy_training.h"

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zeroth::test {

/// Small: a grid runs its threads one after the other.
[[nodiscard]] inline ToyTraining tiny(int zero_stage, int world) {
  ToyTraining training = small(zero_stage, world);
  training.steps = 3;
  training.model.blocks = 4;
  return training;
}

/// Where the states of the optimizer and the parameters rest. Of the last three the device makes the update.
enum Beside : int {
  kHostStates,
  kFiledStates,
  kHalfOfThem,
  kHostBoth,
  kFiledBoth,
  kMixed,
  kHostParameters,
  kFiledParameters,
  kNothing,
  kNumBeside
};

[[nodiscard]] inline ToyTraining beside(ToyTraining training, int where) {
  ResidencyPlan& residency = training.plan.residency;
  const bool states_in_host = where == kHostStates || where == kHostBoth;
  residency.optimizer = states_in_host ? Residency::kHost : Residency::kFiles;
  if (where >= kHostParameters) residency.optimizer = Residency::kDevice;
  residency.optimizer_ratio = where == kHalfOfThem ? 0.5 : 1.0;
  if (where == kHostBoth || where == kMixed || where == kHostParameters) residency.parameter = Residency::kHost;
  if (where == kFiledBoth || where == kFiledParameters) residency.parameter = Residency::kFiles;
  residency.block_elements = 1024;
  residency.slots = 3;
  training.tamper = [before = training.tamper](int rank, ToyStructure& structure, EngineSettings& settings) {
    if (before) before(rank, structure, settings);
    settings.storage = {.folders = {std::filesystem::temp_directory_path().string()}, .stripe_bytes = 4096};
  };
  return training;
}

[[nodiscard]] inline ToyTraining with_update(ToyTraining training, const UpdateSettings& update) {
  training.tamper = [before = training.tamper, update](int rank, ToyStructure& structure, EngineSettings& settings) {
    if (before) before(rank, structure, settings);
    settings.update = update;
  };
  return training;
}

inline constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
inline constexpr const char* kRules[] = {"AdamW", "SGD", "Adam", "Lamb"};

[[nodiscard]] inline ToyTraining with_gradients_beside(ToyTraining training) {
  training.plan.residency.gradient = Residency::kHost;
  return training;
}

/// Of a row of kBesideLevels, with all states on the device.
[[nodiscard]] inline ToyTraining training_of(const FactorRow& row) {
  ToyTraining training = tiny(row[0], row[1] + 1);
  training.model = {.width = 50, .blocks = 3, .dtype = kDtypes[row[2]]};
  training.model.round_gradients = size_of(training.model.dtype) == 2;
  training.model.frozen_blocks = {1};
  training.optimizer = kRules[row[4]];
  training.micro_steps = row[5] == 0 ? 1 : 3;
  if (row[10] == 1) training.plan.policy = ReductionPolicy::kPerStep;
  training.clipping = row[6] == 1 ? 0.0 : 0.5;
  const bool scales = training.model.dtype == DType::kFloat16;
  training.tamper = [scales](int, ToyStructure&, EngineSettings& settings) {
    if (scales) settings.loss_scaling = {.enabled = true, .static_scale = 16.0};
  };
  UpdateSettings update{.inside_backward = row[6] == 1, .rounds_sums = row[7] == 1};
  if (row[6] == 2) update.delayed_after = 1;
  return with_update(std::move(training), update);
}

[[nodiscard]] inline bool has_files(int where) {
  return where == kFiledStates || where == kHalfOfThem || where == kFiledBoth || where == kMixed ||
         where == kFiledParameters;
}

/// A device's own updates come after the vote, and so do those that measure whole parameters.
[[nodiscard]] inline bool is_possible(const FactorRow& row) {
  return (row[3] < kHostParameters && kRules[row[4]] != std::string_view("Lamb")) || row[6] == 0;
}

// stage, ranks, dtype, what rests beside the device, optimizer, micro-steps, when the update runs, rounded sums,
// gradients beside the device, streams that run late, policy
inline const std::vector<int> kBesideLevels{4, 3, 4, kNumBeside, 4, 2, 3, 2, 2, 2, 2};

}  // namespace zeroth::test
