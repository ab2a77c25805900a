// What must not change a bit under LibTorch, as a list: each reference is stage 0 inline, its variants are
// the other stages, what stays gathered, and the order in which streams run.
#pragma once

#include "support/torch_training.h"

#include <array>
#include <vector>

namespace zeroth::testing {

struct ParityPlace {
  int stage;
  Reshard reshard;
};
inline constexpr std::array kParityPlaces{
    ParityPlace{0, Reshard::kDefault}, ParityPlace{1, Reshard::kDefault}, ParityPlace{2, Reshard::kDefault},
    ParityPlace{3, Reshard::kDefault}, ParityPlace{3, Reshard::kAll},     ParityPlace{3, Reshard::kNone},
};

inline std::vector<TorchTraining> parity_references(TorchNet net, DType dtype, int world) {
  std::vector<TorchTraining> references;
  for (const int micro_steps : {1, 3}) {
    for (const ReductionPolicy policy : {ReductionPolicy::kPerMicroStep, ReductionPolicy::kPerStep}) {
      references.push_back({.net = net,
                            .dtype = dtype,
                            .world = world,
                            .micro_steps = micro_steps,
                            .steps = 3,
                            .policy = policy,
                            .reports_memory = false});
    }
  }
  return references;
}

/// Both models in all three dtypes.
inline std::vector<TorchTraining> parity_references(int world) {
  std::vector<TorchTraining> all;
  for (const TorchNet net : {TorchNet::kGpt, TorchNet::kForeign}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
      for (TorchTraining& reference : parity_references(net, dtype, world)) all.push_back(std::move(reference));
    }
  }
  return all;
}

/// Every place in both execution modes, stage 0 inline too: a run must repeat itself.
inline std::vector<TorchTraining> parity_variants(const TorchTraining& reference) {
  std::vector<TorchTraining> variants;
  for (const ParityPlace& place : kParityPlaces) {
    for (const ExecutionMode mode : {ExecutionMode::kInline, ExecutionMode::kChaos}) {
      TorchTraining variant = reference;
      variant.zero_stage = place.stage;
      variant.reshard = place.reshard;
      variant.mode = mode;
      variant.chaos_seed = reference.chaos_seed + 1 + static_cast<std::int64_t>(variants.size());
      variants.push_back(std::move(variant));
    }
  }
  return variants;
}

}  // namespace zeroth::testing
