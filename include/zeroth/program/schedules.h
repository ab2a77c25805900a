// Schedules: pure functions that say in which order the ranks of a pipeline compute.
//
// A schedule holds computations alone (F, B, I, W). The passes of passes.h add messages, gathers, reductions and the
// step; lower() adds them all. A schedule is one file of src/program/schedules/ and one row of its table. A schedule of
// a user's own needs no row: every function that returns a StepProgram is one.
//
//   name         chunks a rank   placement   what it is
//   gpipe        1               round       all forwards, then all backwards
//   1f1b         1               round       a backward as soon as there is one
//   interleaved  v, else 2       round       1f1b over v chunks a rank: the bubble divided by v
//   zb-h1        1               round       1f1b with B cut into I and W: a third of the bubble, the same activations
//   zb-h2        1               round       no bubble, twice the activations
//   zb-v         2               V           no bubble, the same activations
//   v-half       2               V           half the bubble, half the activations
//   v-min        2               V           two thirds of the bubble, a third of the activations
//   dualpipev    2               V           forwards and backwards of the two chunks side by side
//   ouroboros    1               round       backwards of earlier steps: gradients late, no waits for them; inexact
#pragma once

#include <zeroth/program/step_program.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

struct ScheduleOptions {
  int ranks = 1;            ///< of the pipeline
  int micro_batches = 1;    ///< any number; fewer than ranks too
  int chunks_per_rank = 0;  ///< 0: what the schedule has by itself
  bool inexact = false;     ///< allows schedules that train with gradients of older parameters
};

/// The computations of this schedule. Chunk c is on rank c % ranks ("round"), or on c and 2 ranks - 1 - c ("V"). Throws
/// kUsage for an unknown name, with the nearest one, and for options that the schedule does not have.
[[nodiscard]] StepProgram make_schedule(std::string_view name, const ScheduleOptions& options);
/// The names of the table, in its order; `inexact`: those too that train with gradients of older parameters.
[[nodiscard]] std::vector<std::string> schedule_names(bool inexact = false);

/// What F, I and W of one chunk take; B takes I and W together.
struct ChunkTimes {
  double forward = 1;
  double input = 1;
  double weight = 1;
};

/// What is known of a schedule in closed form, if all chunks take the same time and messages none.
struct ScheduleFormula {
  /// Simulation::bubble: the longest wait of a rank between its first computation and its last one. None where there is
  /// no closed form: too few micro-batches, or times other than those for which a schedule is made. The V schedules are
  /// made for I and W that take as long as F.
  std::optional<double> bubble{};
  std::string bubble_text{};  ///< of the general case
  /// Pairs of chunk and micro-batch whose activations a rank holds at most, one entry a rank.
  std::vector<int> in_flight{};
  bool in_flight_is_exact = false;  ///< false: a bound, which some rank reaches if there are 2p micro-batches or more
};

/// Throws as make_schedule() does.
[[nodiscard]] ScheduleFormula schedule_formula(std::string_view name, const ScheduleOptions& options,
                                               const ChunkTimes& times = {});

}  // namespace zeroth
