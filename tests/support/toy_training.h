// Trains the toy model on ranks that are threads, and returns everything that could differ.
#pragma once

#include "support/thread_groups.h"
#include "support/toy_model.h"

#include <zeroth/base/log.h>
#include <zeroth/engine/engine.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace zeroth::test {

struct ToyTraining {
  ToyOptions model{};
  std::uint64_t model_seed = 7;  ///< of its initial values
  ShardingPlan plan = zero_plan(0, {"dp"});
  int world = 1;
  ThreadTransport transport = ThreadTransport::kMemory;
  int per_node = 0;  ///< ranks on a node; 0: all
  int micro_steps = 1;
  int passes = 1;  ///< forwards and backwards before each call of step(); `skip` sees step * passes + pass
  int steps = 6;
  int first_step = 0;  ///< number of the first, for its data
  double clipping = 0.5;
  std::string optimizer = "AdamW";
  ExecutionMode mode = ExecutionMode::kInline;
  std::uint64_t chaos_seed = 0;
  int threads = 1;
  int max_nonfinite_steps = 10;
  std::uint64_t memory_limit_bytes = 0;
  SkipRule skip{};
  SkipRule left_out{};              ///< the block's bias gets no gradient
  bool zeros_for_left_out = false;  ///< or one of zeros
  ToyModel::PoisonRule poison{};
  ToyModel::ChosenRule chosen_gradients{};
  std::function<int(int rank)> data_of{};  ///< whose data a rank trains on; unset: its own
  /// Changes what one rank asks for, to make ranks disagree.
  std::function<void(int rank, ToyStructure&, EngineSettings&)> tamper{};
  /// Runs on every rank before the first step.
  std::function<void(Engine&, ToyModel&)> at_start{};
  /// Runs on every rank after each step; for what a single test wants to do or look at.
  std::function<void(Engine&, ToyModel&, const StepResult&)> after_step{};
  /// The same after each micro-step that is not a step's last one; `ended`: micro-steps of the step so far.
  std::function<void(Engine&, int step, int ended)> after_micro_step{};
  /// The same before each micro-step; returns the number of its data, which is that of the micro-step where unset.
  std::function<int(Engine&, ToyModel&, int step, int micro_step)> before_micro_step{};
  int first_micro_step = 0;  ///< of the first step
  static constexpr int kEndOfBackward = -1;
  /// Called on every rank when the engine is there, with the group that it has: what the model does itself when the
  /// parameters of a unit are there, and at the end of a backward, in calls of groups that are split from this one.
  std::function<ToyModel::Visitor(CommBackend&)> visitor{};
  Milliseconds timeout{60'000};  ///< of every wait
  /// A report reads the process's smaps, which takes longer than a training as small as this. Without, `memory` stays
  /// empty.
  bool reports_memory = true;
  Logger logger{};                                                 ///< of the engine; writes nothing
  std::function<std::unique_ptr<Device>(int rank)> make_device{};  ///< unset: a CPU
  std::function<std::unique_ptr<ToyMemory>()> make_memory{};       ///< unset: the host reads the device's
  /// Replaces the backend that a rank talks through: delays, faults.
  std::function<std::unique_ptr<CommBackend>(std::unique_ptr<CommBackend>, int rank)> decorate{};
};

/// Same on every rank, or the run throws.
struct ToyOutcome {
  std::vector<std::string> losses{};  ///< mean over ranks and micro-steps, as hexadecimal floats, one a step
  std::vector<std::string> norms{};
  std::vector<std::vector<double>> values{};  ///< parameters at the end
  std::vector<MemoryReport> memory{};         ///< one a rank, if wanted
  std::vector<std::uint64_t> gather_bytes{};  ///< one a rank: all_gather bytes of the last step, matched and one-sided
  std::vector<std::uint64_t> reduce_bytes{};
  std::vector<std::uint64_t> far_gather_bytes{};  ///< of these from other nodes
  std::vector<std::uint64_t> far_reduce_bytes{};
  std::vector<WireBytes> planned_wire{};
  std::vector<StepResult> results{};  ///< one a step

  /// What must not depend on the plan.
  [[nodiscard]] bool same_numbers(const ToyOutcome& other) const {
    return losses == other.losses && norms == other.norms && values == other.values;
  }
};

[[nodiscard]] ToyOutcome train_toy(const ToyTraining& training);
/// One rank of it, over any backend; per-rank vectors of the outcome have one entry. Tells the others if it throws.
[[nodiscard]] ToyOutcome train_toy_rank(const ToyTraining& training, std::unique_ptr<CommBackend> backend);
/// Each rank skips half of the blocks, in each step and micro-step others, as the seed decides.
[[nodiscard]] SkipRule random_paths(std::uint64_t seed);
/// First difference in words, for assertion messages.
[[nodiscard]] std::string difference(const ToyOutcome& expected, const ToyOutcome& got);

}  // namespace zeroth::test
