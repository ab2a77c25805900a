// A torch-free model with experts: each rank has one expert of a layer, and tokens travel to the ranks that have
// theirs.
//
//   h_t = W_in x_t;  each layer: h_t += act(W_l h_t);  h_t += act(E_l,e h_t + b_l,e) with expert e = t mod 2;
//   loss = mean over tokens (w_out h_t - target)^2 / 2
//
// On 4 ranks as a mesh of edp = 2 and ep = 2: dense units are summed over all ranks, expert e over the two ranks with
// ep = e. In one process: the four batches are four micro-steps, with the same sums in the same order.
#pragma once

#include "support/toy_model.h"

#include <zeroth/comm/mesh.h>
#include <zeroth/engine/engine.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace zeroth::test {

inline constexpr int kExpertRanks = 4;
inline constexpr int kFirstExpert = 3;  ///< number of the weight of the first layer's expert on its ranks

struct ExpertsTraining {
  int layers = 3;
  int width = 40;
  int steps = 4;
  int micro_steps = 1;  ///< of the ranks, not of the one process
  ShardingPlan dense = zero_plan(0, {"edp", "ep"});
  ShardingPlan experts = zero_plan(0, {"edp"});
  ExecutionMode mode = ExecutionMode::kInline;
  std::uint64_t chaos_seed = 0;
  double clipping = 0.5;
  /// Gradients of parameter `param` of this rank become NaN where the rule says so.
  std::function<bool(int rank, std::int64_t step, int param)> poison{};
  std::function<void(int rank, std::vector<ParamSpec>&, EngineSettings&)> tamper{};
  std::function<void(Engine&, std::int64_t step)> before_step{};
};

/// Of one rank, or of the one process.
struct ExpertsOutcome {
  std::vector<StepResult> results{};
  std::vector<std::string> norms{};
  std::vector<std::string> names{};           ///< of parameters; experts with their number: "experts.0.1.weight"
  std::vector<std::vector<double>> values{};  ///< in the same order
  MemoryReport memory{};
  TransferReport transfers{};
  WireBytes planned_wire{};
  std::uint64_t gather_bytes = 0;  ///< of the last step, with reductions in reduce_bytes
  std::uint64_t reduce_bytes = 0;
};

[[nodiscard]] ExpertsOutcome train_experts_rank(const ExpertsTraining& training, std::unique_ptr<CommBackend> backend);
[[nodiscard]] ExpertsOutcome train_experts_in_one_process(const ExpertsTraining& training);

/// What a rank has other than the one process: norms, and values of the parameters that it has. "" for nothing.
[[nodiscard]] std::string difference(const ExpertsOutcome& one_process, const ExpertsOutcome& rank);

}  // namespace zeroth::test
