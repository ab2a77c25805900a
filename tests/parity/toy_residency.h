// Trainings of the toy model whose states rest in files, as rows of factors.
#pragma once

#include "support/covering_array.h"
#include "support/toy_training.h"
#include "toy_engine.h"

#include <zeroth/io/io_queue.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

namespace zeroth::test {

inline constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
inline constexpr double kRatios[] = {1.0, 0.5, 0.0};
inline constexpr int kSlots[] = {2, 3, 6};
inline constexpr IoEngineKind kEngines[] = {IoEngineKind::kThreads, IoEngineKind::kAuto};
inline constexpr const char* kOptimizers[] = {"AdamW", "SGD", "Lamb"};

[[nodiscard]] inline ToyTraining training_of(const FactorRow& row) {
  ToyTraining training = small(row[0], row[1] + 1);
  training.micro_steps = row[2] == 0 ? 1 : 3;
  training.model = {.width = 70, .blocks = 4, .dtype = kDtypes[row[3]]};  // a block has 4,970 parameters
  training.model.frozen_blocks = {1};
  training.model.tie_first_two = true;
  training.model.round_gradients = size_of(training.model.dtype) == 2;
  training.optimizer = kOptimizers[row[7]];
  training.transport = row[6] == 0 ? ThreadTransport::kMemory : ThreadTransport::kMessages;
  const bool scales = training.model.dtype == DType::kFloat16;
  training.tamper = [scales](int, ToyStructure&, EngineSettings& settings) {
    if (scales) settings.loss_scaling = {.enabled = true, .initial_power = 4, .window = 1};
  };
  return training;
}

/// What rests in files.
enum Filed : int { kOptimizerStates, kParameters, kBoth };

/// The least of parameters in memory that the engine takes: the root's, the largest unit.
[[nodiscard]] inline std::int64_t smallest_working_set(const FactorRow& row) {
  const bool whole = row[0] < 3 || row[1] == 0;
  return 1024 * (whole ? 7 : row[1] == 1 ? 4 : 3);
}

[[nodiscard]] inline ToyTraining in_files(ToyTraining training, const FactorRow& row) {
  training.mode = row[9] == 0 ? ExecutionMode::kInline : ExecutionMode::kChaos;
  training.plan.residency = {.optimizer = row[10] == kParameters ? Residency::kDevice : Residency::kFiles,
                             .parameter = row[10] == kOptimizerStates ? Residency::kDevice : Residency::kFiles,
                             .optimizer_ratio = kRatios[row[4]],
                             .block_elements = 1024,
                             .slots = kSlots[row[5]],
                             .parameter_elements = row[11] == 0 ? 0 : smallest_working_set(row)};
  const auto before = training.tamper;
  const IoEngineKind engine = kEngines[row[8]];
  training.tamper = [before, engine](int rank, ToyStructure& structure, EngineSettings& settings) {
    if (before) before(rank, structure, settings);
    settings.storage = {
        .folders = {std::filesystem::temp_directory_path().string()}, .engine = engine, .stripe_bytes = 4096};
  };
  return training;
}

// stage, ranks, micro-steps, dtype, ratio, slots, transport, optimizer, engine, execution, what rests in files, how
// many parameters in memory
inline const std::vector<int> kResidencyLevels{4, 3, 2, 3, 3, 3, 2, 3, 2, 2, 3, 2};

[[nodiscard]] inline ToyTraining with_settings(ToyTraining training,
                                               const std::function<void(EngineSettings&)>& change) {
  training.tamper = [before = training.tamper, change](int rank, ToyStructure& structure, EngineSettings& settings) {
    if (before) before(rank, structure, settings);
    change(settings);
  };
  return training;
}

}  // namespace zeroth::test
