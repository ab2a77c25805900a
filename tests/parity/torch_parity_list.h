// What must not change a bit under LibTorch, as a list: each reference is stage 0 inline, its variants are
// the other stages, what stays gathered, and the order in which streams run. `make test` takes rows of it in which any
// two of its factors meet.
#pragma once

#include "support/covering_array.h"
#include "support/torch_training.h"

#include <array>
#include <cmath>
#include <limits>
#include <vector>

namespace zeroth::test {

struct ParityPlace {
  int stage;
  Reshard reshard;
};
inline constexpr std::array kParityPlaces{
    ParityPlace{0, Reshard::kDefault}, ParityPlace{1, Reshard::kDefault}, ParityPlace{2, Reshard::kDefault},
    ParityPlace{3, Reshard::kDefault}, ParityPlace{3, Reshard::kAll},     ParityPlace{3, Reshard::kNone},
};

struct ParityGroup {
  TorchTraining reference;
  std::vector<TorchTraining> variants{};
};

/// Stage 0, inline.
inline TorchTraining parity_reference(TorchNet net, DType dtype, int world, int micro_steps, ReductionPolicy policy) {
  return {.net = net,
          .dtype = dtype,
          .world = world,
          .micro_steps = micro_steps,
          .steps = 3,
          .policy = policy,
          .reports_memory = false};
}

inline TorchTraining parity_variant(const TorchTraining& reference, const ParityPlace& place, ExecutionMode mode,
                                    std::size_t number) {
  TorchTraining variant = reference;
  variant.zero_stage = place.stage;
  variant.reshard = place.reshard;
  variant.mode = mode;
  variant.chaos_seed = reference.chaos_seed + 1 + static_cast<std::int64_t>(number);
  return variant;
}

inline constexpr std::array kParityNets{TorchNet::kGpt, TorchNet::kForeign};
inline constexpr std::array kParityDtypes{DType::kFloat32, DType::kFloat64, DType::kBFloat16};
inline constexpr std::array kParityMicroSteps{1, 3};
inline constexpr std::array kParityPolicies{ReductionPolicy::kPerMicroStep, ReductionPolicy::kPerStep};
inline constexpr std::array kParityModes{ExecutionMode::kInline, ExecutionMode::kChaos};

/// Every place in both execution modes, stage 0 inline too: a run must repeat itself.
inline std::vector<ParityGroup> parity_grid(TorchNet net, DType dtype, int world) {
  std::vector<ParityGroup> groups;
  for (const int micro_steps : kParityMicroSteps) {
    for (const ReductionPolicy policy : kParityPolicies) {
      ParityGroup group{parity_reference(net, dtype, world, micro_steps, policy)};
      for (const ParityPlace& place : kParityPlaces) {
        for (const ExecutionMode mode : kParityModes) {
          group.variants.push_back(parity_variant(group.reference, place, mode, group.variants.size()));
        }
      }
      groups.push_back(std::move(group));
    }
  }
  return groups;
}

/// Both models in all three dtypes.
inline std::vector<ParityGroup> parity_grid(int world) {
  std::vector<ParityGroup> all;
  for (const TorchNet net : kParityNets) {
    for (const DType dtype : kParityDtypes) {
      for (ParityGroup& group : parity_grid(net, dtype, world)) all.push_back(std::move(group));
    }
  }
  return all;
}

/// One variant each: any two of the worlds and of all that the grid is made of.
inline std::vector<ParityGroup> parity_rows(const std::vector<int>& worlds) {
  const std::vector<int> levels{
      static_cast<int>(worlds.size()), kParityNets.size(),   kParityDtypes.size(), kParityMicroSteps.size(),
      kParityPolicies.size(),          kParityPlaces.size(), kParityModes.size()};
  std::vector<ParityGroup> groups;
  for (const FactorRow& row : covering_array(levels, 2)) {
    const auto at = [&](std::size_t factor) { return static_cast<std::size_t>(row[factor]); };
    ParityGroup group{parity_reference(kParityNets[at(1)], kParityDtypes[at(2)], worlds[at(0)],
                                       kParityMicroSteps[at(3)], kParityPolicies[at(4)])};
    group.variants.push_back(parity_variant(group.reference, kParityPlaces[at(5)], kParityModes[at(6)], groups.size()));
    groups.push_back(std::move(group));
  }
  return groups;
}

/// The outcome with one bit changed: of a loss, of a norm, of a parameter, of what is said of a rank's buffers.
inline std::vector<TorchOutcome> one_bit_apart(const TorchOutcome& outcome) {
  constexpr double kUp = std::numeric_limits<double>::infinity();
  std::vector<TorchOutcome> others(4, outcome);
  others[0].losses.back() = std::nextafter(others[0].losses.back(), kUp);
  others[1].norms.back() = std::nextafter(others[1].norms.back(), kUp);
  others[2].values.rbegin()->second.bytes.back() ^= std::byte{1};
  others[3].buffers.back() += "1";
  return others;
}

}  // namespace zeroth::test
