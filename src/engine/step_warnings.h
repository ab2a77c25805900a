// StepWarnings: what looks wrong over several steps, and how many of them were skipped in a row.
#pragma once

#include "engine/commit_vote.h"
#include "engine/straggler.h"

#include <zeroth/base/log.h>
#include <zeroth/engine/step_result.h>
#include <zeroth/zero/model_layout.h>

#include <cstdint>

namespace zeroth {

class StepWarnings {
 public:
  /// `model` and `log` outlive this.
  StepWarnings(const ModelLayout& model, int max_nonfinite_steps, int rank, const Logger& log)
      : model_(model), max_nonfinite_steps_(max_nonfinite_steps), rank_(rank), log_(log) {}

  /// Ranks that are slow, or run more backwards than others. `committed`: steps before this one. `timed`: its times are
  /// those of a step.
  void look_at(const CommitVote& vote, std::int64_t committed, bool timed);
  /// The first parameter whose gradient did not fit its 16-bit bucket, -1.
  void look_at_wide_gradient(int param);
  /// At the end of a step. Throws kNonFinite after too many faults in a row; an overflow under a loss scale is none.
  void count(const StepResult& result);

 private:
  const ModelLayout& model_;
  int max_nonfinite_steps_;
  int rank_;
  const Logger& log_;
  StragglerDetector stragglers_;
  bool warned_of_uneven_ = false;
  bool warned_of_wide_gradient_ = false;
  int nonfinite_in_a_row_ = 0;
};

}  // namespace zeroth
