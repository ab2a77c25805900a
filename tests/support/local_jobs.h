// The training of tests of sites: the same in ranks of zeroth-run and in what they are compared with.
#pragma once

#include "support/toy_training.h"

#include <zeroth/base/text.h>
#include <zeroth/engine/local_updates.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::test {

inline constexpr int kStepsOfSites = 12;

/// Of plain SGD, which remembers nothing: a site that comes back is one that had always been there.
inline ToyTraining toy_of_sites(int zero_stage, int ranks) {
  ToyTraining training;
  training.model = {.width = 40, .blocks = 3};
  training.model.frozen_blocks = {1};
  training.world = ranks;
  training.plan = zero_plan(zero_stage, {"dp"});
  training.optimizer = "SGD";
  training.tamper = [](int, ToyStructure&, EngineSettings& settings) { settings.optimizer.momentum = false; };
  training.reports_memory = false;
  return training;
}

/// "average", "diloco", "streaming", "co2": three steps in a window.
inline LocalSettings settings_of_sites(std::string_view name) {
  if (name == "average") return {.steps = 3};
  if (name == "co2") return {.method = LocalMethod::kCo2, .steps = 3, .outer_momentum = 0.5, .nesterov = false};
  LocalSettings settings{.steps = 3, .outer_lr = 0.7, .outer_momentum = 0.9};
  if (name == "streaming") {
    settings.fragments = 2;
    settings.delay = 1;
    settings.keep_local = 0.25;
    settings.payload = LocalPayload::kInt8;
  }
  return settings;
}

inline std::string digest_of(const std::vector<std::vector<double>>& values) {
  std::string bytes;
  for (const std::vector<double>& one : values)
    bytes.append(reinterpret_cast<const char*>(one.data()), one.size() * sizeof(double));
  return std::to_string(digest64(bytes));
}

}  // namespace zeroth::test
