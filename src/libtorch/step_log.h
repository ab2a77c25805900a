// StepLog: the record of each step, and a line of progress from time to time.
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/base/log.h>
#include <zeroth/engine/step_result.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace zeroth::libtorch {

class StepLog {
 public:
  /// `log` outlives this.
  explicit StepLog(const Logger& log) : log_(log) {}

  /// A line at most so often; 0: none.
  void set_every(Milliseconds every) { every_ = every; }
  void report(const StepResult& result);
  /// Goes with the next report: the least entropy of the load of a layer of experts, that layer's name, and how many
  /// choices were dropped in all layers, of this rank's tokens.
  void note_experts(double entropy, std::string layer, std::int64_t dropped) {
    experts_ = ExpertsNote{entropy, std::move(layer), dropped};
  }

 private:
  struct ExpertsNote {
    double entropy = 0.0;
    std::string layer{};
    std::int64_t dropped = 0;
  };
  const Logger& log_;
  std::optional<ExpertsNote> experts_{};
  Milliseconds every_{0};
  SteadyClock::time_point reported_at_ = SteadyClock::now();  // the last line of progress, or the beginning
  std::int64_t reported_step_ = 0;
  SteadyClock::time_point stepped_at_ = SteadyClock::now();
};

}  // namespace zeroth::libtorch
