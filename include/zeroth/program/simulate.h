// Simulator: when each action of a program runs, if computations and links take given times, and what is held
// meanwhile.
//
// Times are in any unit, say seconds; bytes are bytes. What a program means is in verify.h. The clocks:
//   - computations (F, B, I, W, RECOMPUTE, V_S, V_T) of a rank follow each other
//   - a send takes no time of its rank. Messages from one rank to another follow each other on their link: each
//     occupies it for bytes / bytes_per_second, and is there `latency` later
//   - a receive ends when its message is there
//   - UNSHARD, REDUCE, FETCH and FLUSH run beside the computations, each kind after the last of its kind on its rank.
//     A computation waits for the gather of its chunk and for the fetch of its activations, STEP for all of its rank
//   - collectives of a split output layer end `collective` after the last rank has come to them
//   - STEP begins when all ranks have come to it; in an inexact program with Costs::steps_meet alone
#pragma once

#include <zeroth/program/step_program.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroth {

struct ChunkCosts {
  double forward = 1;                 ///< F
  double input = 1;                   ///< I
  double weight = 1;                  ///< W
  double whole = -1;                  ///< B; negative: I and W together
  double recompute = -1;              ///< negative: as F
  double unshard = 0;                 ///< one gather of the chunk's parameters
  double reduce = 0;                  ///< its share of REDUCE
  double copy = 0;                    ///< FETCH or FLUSH of the activations of one micro-batch
  double state_copy = 0;              ///< FETCH or FLUSH of the chunk's states
  std::int64_t activation_bytes = 1;  ///< of a micro-batch, from F to B or W
  std::int64_t weight_bytes = -1;     ///< the part that W still needs after I; negative: all of them
  std::int64_t input_bytes = 0;       ///< the part that stays until RECOMPUTE, where there is one
  std::int64_t output_bytes = 0;      ///< of the message to the next chunk, and of the one that comes back
};

struct LinkCosts {
  double latency = 0;
  double bytes_per_second = 0;  ///< 0: no limit
  bool operator==(const LinkCosts&) const = default;
};

struct Costs {
  std::vector<ChunkCosts> chunks{};                  ///< one a chunk; one for all; none: ChunkCosts{}
  std::vector<double> speeds{};                      ///< one a rank, divides the times of its computations; none: all 1
  LinkCosts link{};                                  ///< between two ranks
  std::map<std::pair<int, int>, LinkCosts> links{};  ///< those that are unlike it, (from, to)
  double step = 0;
  double vocabulary_scores = 1;     ///< V_S on one rank
  double vocabulary_gradients = 1;  ///< V_T on one rank
  double collective = 0;            ///< V_INPUT, V_SUM, V_GRAD
  /// All ranks come to each STEP of an inexact program before it begins, as in the engine. Of programs whose messages
  /// cross no STEP, as those of unrolled(); else simulate() throws kUsage.
  bool steps_meet = false;
  std::vector<Dependence> dependences{};

  [[nodiscard]] const ChunkCosts& of(int chunk) const;
};

struct TimedAction {
  Action action{};
  double begin = 0;
  double end = 0;
};

struct LivePoint {
  double time = 0;
  int pairs = 0;  ///< of chunk and micro-batch whose activations the rank holds from here on
  std::int64_t bytes = 0;
};

struct RankTimes {
  std::vector<TimedAction> actions{};  ///< in the order of the program
  double busy = 0;                     ///< sum of the computations
  double bubble = 0;                   ///< from the first computation to the end of the last one, less busy
  int most_pairs = 0;
  std::int64_t most_bytes = 0;
  std::vector<LivePoint> live{};
};

struct LinkUse {
  int from = 0;
  int to = 0;
  std::int64_t messages = 0;
  std::int64_t bytes = 0;
  double busy = 0;
};

struct Simulation {
  double step_time = 0;  ///< from the begin of the first action to the end of the last one
  double bubble = 0;     ///< the largest one of a rank: what 3.8 of the formulas and the papers call the bubble
  std::vector<RankTimes> ranks{};
  std::vector<LinkUse> links{};  ///< those that have messages, by (from, to)

  /// The bubble divided by what the busiest rank computes.
  [[nodiscard]] double bubble_of_ideal() const;
};

/// Of a program with late gradients simulate what unrolled() makes of it. Throws kUsage for one, with what refute()
/// says about ranks that wait for each other, for costs that are negative or not one a chunk, and for speeds that are
/// not positive. Time: linear in the number of actions, but for the sort of live points.
[[nodiscard]] Simulation simulate(const StepProgram& program, const Costs& costs = {});

/// Chrome's trace format (chrome://tracing, ui.perfetto.dev): a process a rank, with threads for computations, waits,
/// gathers, reductions and copies; a counter of held pairs. A unit of time is shown as `unit_us` microseconds.
[[nodiscard]] std::string chrome_trace(const StepProgram& program, const Simulation& simulation, double unit_us = 1e6);
/// A picture: a row a rank, a box a computation with its micro-batch, coloured by kind; chunks but a rank's first have
/// a darker colour. For up to 64 ranks and 20,000 actions; throws kUsage beyond.
[[nodiscard]] std::string svg_picture(const StepProgram& program, const Simulation& simulation);
/// The same as text, for programs whose times are multiples of `unit`: a line a rank, a column a unit.
[[nodiscard]] std::string text_picture(const StepProgram& program, const Simulation& simulation, double unit = 1);

}  // namespace zeroth
