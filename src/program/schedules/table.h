// The table of schedules: one row a file of this folder.
#pragma once

#include <zeroth/program/schedules.h>

#include <span>
#include <string_view>

namespace zeroth::schedules {

enum class Chunks {
  kOne,   ///< one a rank
  kAny,   ///< as many as asked for, two by itself
  kPair,  ///< two a rank, placed as a V
};

struct Row {
  std::string_view name;
  Chunks chunks;
  /// Gets options that are checked, with the number of chunks filled in.
  StepProgram (*make)(const ScheduleOptions& options);
};

[[nodiscard]] std::span<const Row> table();
/// Throws kUsage with the nearest name.
[[nodiscard]] const Row& row_of(std::string_view name);

[[nodiscard]] StepProgram gpipe(const ScheduleOptions& options);
[[nodiscard]] StepProgram one_forward_one_backward(const ScheduleOptions& options);
[[nodiscard]] StepProgram interleaved(const ScheduleOptions& options);

[[nodiscard]] StepProgram zb_h1(const ScheduleOptions& options);
[[nodiscard]] StepProgram zb_h2(const ScheduleOptions& options);
[[nodiscard]] StepProgram zb_v(const ScheduleOptions& options);
[[nodiscard]] StepProgram v_half(const ScheduleOptions& options);
[[nodiscard]] StepProgram v_min(const ScheduleOptions& options);
[[nodiscard]] StepProgram dual_pipe_v(const ScheduleOptions& options);

/// Empty lists for the ranks; chunk c on rank c % ranks.
[[nodiscard]] StepProgram placed_round(std::string_view name, const ScheduleOptions& options);

/// Leaves out the micro-batches from `micro_batches` on. What is left is in order if the whole was: every action needs
/// actions of its own micro-batch alone.
[[nodiscard]] StepProgram keep_micro_batches(StepProgram program, int micro_batches);

}  // namespace zeroth::schedules
