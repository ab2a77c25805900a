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
  ScheduleFormula (*formula)(const ScheduleOptions& options, const ChunkTimes& times);
  bool inexact = false;  ///< only for those who ask for it
};

[[nodiscard]] std::span<const Row> table();
/// Throws kUsage with the nearest name.
[[nodiscard]] const Row& row_of(std::string_view name);

[[nodiscard]] StepProgram gpipe(const ScheduleOptions& options);
[[nodiscard]] ScheduleFormula gpipe_formula(const ScheduleOptions& options, const ChunkTimes& times);
[[nodiscard]] StepProgram one_forward_one_backward(const ScheduleOptions& options);
[[nodiscard]] ScheduleFormula one_forward_one_backward_formula(const ScheduleOptions& options, const ChunkTimes& times);
[[nodiscard]] StepProgram interleaved(const ScheduleOptions& options);
[[nodiscard]] ScheduleFormula interleaved_formula(const ScheduleOptions& options, const ChunkTimes& times);
[[nodiscard]] StepProgram zb_h1(const ScheduleOptions& options);
[[nodiscard]] ScheduleFormula zb_h1_formula(const ScheduleOptions& options, const ChunkTimes& times);
[[nodiscard]] StepProgram zb_h2(const ScheduleOptions& options);
[[nodiscard]] ScheduleFormula zb_h2_formula(const ScheduleOptions& options, const ChunkTimes& times);
[[nodiscard]] StepProgram zb_v(const ScheduleOptions& options);
[[nodiscard]] ScheduleFormula zb_v_formula(const ScheduleOptions& options, const ChunkTimes& times);
[[nodiscard]] StepProgram v_half(const ScheduleOptions& options);
[[nodiscard]] ScheduleFormula v_half_formula(const ScheduleOptions& options, const ChunkTimes& times);
[[nodiscard]] StepProgram v_min(const ScheduleOptions& options);
[[nodiscard]] ScheduleFormula v_min_formula(const ScheduleOptions& options, const ChunkTimes& times);
[[nodiscard]] StepProgram dual_pipe_v(const ScheduleOptions& options);
[[nodiscard]] ScheduleFormula dual_pipe_v_formula(const ScheduleOptions& options, const ChunkTimes& times);
[[nodiscard]] StepProgram ouroboros(const ScheduleOptions& options);
[[nodiscard]] ScheduleFormula ouroboros_formula(const ScheduleOptions& options, const ChunkTimes& times);

/// Whether F, I and W take the same time.
[[nodiscard]] bool are_equal(const ChunkTimes& times);
/// The same number for every rank.
[[nodiscard]] std::vector<int> on_every_rank(const ScheduleOptions& options, int number);

/// Empty lists for the ranks; chunk c on rank c % ranks.
[[nodiscard]] StepProgram placed_round(std::string_view name, const ScheduleOptions& options);

/// Leaves out the micro-batches from `micro_batches` on. What is left is in order if the whole was: every action needs
/// actions of its own micro-batch alone.
[[nodiscard]] StepProgram keep_micro_batches(StepProgram program, int micro_batches);

}  // namespace zeroth::schedules
