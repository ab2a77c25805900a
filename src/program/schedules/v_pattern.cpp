// V-Half and V-Min: two chunks a rank, placed as a V, with about a half and a third of the activations of 1F1B.
//
// Every micro-batch makes the same way, six units of time after the one before: down the ranks and up again with its
// forwards (F), then down and up with its gradients (I). How many units it takes from rank to rank says how long its
// activations are held: 1 + 2 + 1 + 2 units a rank make a half, 1 + 1 + 1 + 1 a third. Two of the six units of a rank
// stay for W. That gives the order of F and I; W is put where a rank would wait, and where it holds too much.
// Ref: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, sections 3 and 4.
#include "program/schedules/v_rank.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <utility>

namespace zeroth::schedules {
namespace {

constexpr int kInterval = 6;  // F, I and W of two chunks

/// Units from a rank to the next one: forward down, forward up, gradient down, gradient up.
using Hops = std::array<int, 4>;
/// Units at the three turns of the way: at the last rank, at the first one, at the last one again.
using Turns = std::array<int, 3>;
/// When a rank computes the first micro-batch, in the order of Hops.
using Starts = std::array<int, 4>;

Starts starts_of(const Hops& hops, const Turns& turns, int ranks, int rank) {
  const int last = ranks - 1;
  const int up = hops[0] * last + turns[0];
  const int gradient_down = up + hops[1] * last + turns[1];
  const int gradient_up = gradient_down + hops[2] * last + turns[2];
  return {hops[0] * rank, up + hops[1] * (last - rank), gradient_down + hops[2] * rank,
          gradient_up + hops[3] * (last - rank)};
}

/// Whether no two computations of a rank fall on the same unit of the interval.
bool fits(const Hops& hops, const Turns& turns, int ranks) {
  for (int rank = 0; rank < std::min(ranks, kInterval); ++rank) {  // then it repeats
    std::array<bool, kInterval> taken{};
    for (const int start : starts_of(hops, turns, ranks, rank)) {
      bool& unit = taken[static_cast<std::size_t>(start % kInterval)];
      if (unit) return false;
      unit = true;
    }
  }
  return true;
}

/// The shortest turns that fit; the first of equal ones.
Turns shortest_turns(const Hops& hops, int ranks) {
  Turns best{};
  int shortest = std::numeric_limits<int>::max();
  for (int a = 1; a <= 2 * kInterval; ++a) {
    for (int b = 1; b <= 2 * kInterval; ++b) {
      for (int c = 1; c <= 2 * kInterval; ++c) {
        if (a + b + c >= shortest || !fits(hops, {a, b, c}, ranks)) continue;
        best = {a, b, c};
        shortest = a + b + c;
      }
    }
  }
  return best;
}

/// F and I of a rank in the order of their times.
std::vector<Action> pattern_of(const Hops& hops, const Turns& turns, int ranks, int rank, int micro_batches) {
  const Starts starts = starts_of(hops, turns, ranks, rank);
  std::vector<std::pair<int, Action>> timed;
  for (int m = 0; m < micro_batches; ++m) {
    for (std::size_t i = 0; i < starts.size(); ++i) {
      const bool down = i % 2 == 0;
      const bool forward = i < 2;
      timed.emplace_back(starts[i] + kInterval * m,
                         Action{.kind = forward ? ActionKind::kForward : ActionKind::kBackwardInput,
                                .chunk = down == forward ? rank : 2 * ranks - 1 - rank,
                                .micro_batch = m});
    }
  }
  std::ranges::sort(timed, {}, &std::pair<int, Action>::first);
  std::vector<Action> actions;
  for (const auto& [time, action] : timed) actions.push_back(action);
  return actions;
}

StepProgram with_pattern(std::string_view name, const ScheduleOptions& options, const Hops& hops, int held) {
  StepProgram program = placed_as_v(name, options);
  const Turns turns = shortest_turns(hops, options.ranks);
  for (int rank = 0; rank < options.ranks; ++rank) {
    program.actions[static_cast<std::size_t>(rank)] =
        pattern_of(hops, turns, options.ranks, rank, options.micro_batches);
  }
  return fill_with_weights(std::move(program), held);
}

int held_by_half(int ranks) {
  return ranks + (ranks % 2 == 0 ? 2 : 1);
}

int held_by_min(int ranks) {
  return (2 * ranks + 2) / 3 + 2;
}

/// The bubble is known for equal times and at least as many micro-batches as ranks, in units of one of these times.
ScheduleFormula formula_of(const ScheduleOptions& options, const ChunkTimes& times, int units, int held) {
  ScheduleFormula formula{.in_flight = on_every_rank(options, std::min(2 * options.micro_batches, held))};
  if (are_equal(times) && options.micro_batches >= options.ranks) formula.bubble = units * times.forward;
  return formula;
}

}  // namespace

StepProgram v_half(const ScheduleOptions& options) {
  return with_pattern("v-half", options, {2, 1, 2, 1}, held_by_half(options.ranks));
}

StepProgram v_min(const ScheduleOptions& options) {
  return with_pattern("v-min", options, {1, 1, 1, 1}, held_by_min(options.ranks));
}

ScheduleFormula v_half_formula(const ScheduleOptions& options, const ChunkTimes& times) {
  const int units = 3 * (options.ranks - 1) - (options.ranks > 2 ? 1 : 0);
  ScheduleFormula formula = formula_of(options, times, units, held_by_half(options.ranks));
  formula.bubble_text = "3(p-1)F, less F if p > 2, if F = I = W and m >= p";
  return formula;
}

ScheduleFormula v_min_formula(const ScheduleOptions& options, const ChunkTimes& times) {
  // Ranks that three divides need a longer turn: no two computations of a rank may fall together.
  const int turn = options.ranks == 1 ? 0 : options.ranks % 3 == 0 ? 1 : -1;
  ScheduleFormula formula = formula_of(options, times, 4 * (options.ranks - 1) + turn, held_by_min(options.ranks));
  formula.bubble_text = "4(p-1)F, plus F if 3 divides p, else less F, if F = I = W and m >= p";
  return formula;
}

}  // namespace zeroth::schedules
