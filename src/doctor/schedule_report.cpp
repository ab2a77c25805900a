#include "doctor/schedule_report.h"

#include <zeroth/base/error.h>
#include <zeroth/program/passes.h>
#include <zeroth/program/verify.h>

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

namespace zeroth::doctor {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file)
    throw Error(ErrorCode::kIo, "a file cannot be read: " + errno_text(errno),
                {.where = "zeroth.schedule", .which = path});
  return std::move(text).str();
}

bool has_backward(const StepProgram& program) {
  return std::ranges::any_of(program.actions, [](const std::vector<Action>& actions) {
    return std::ranges::any_of(actions, [](const Action& action) { return is_backward(action.kind); });
  });
}

/// Of the schedule as it is: passes that change what ranks compute or hold, and messages that take time, have none.
std::optional<ScheduleFormula> formula_of(const ScheduleCommand& command) {
  const LowerOptions& passes = command.passes;
  const bool plain = !passes.recompute && !passes.offload_activations && passes.vocabulary == Vocabulary::kNone;
  if (command.name.empty() || !plain) return std::nullopt;
  ScheduleFormula formula = schedule_formula(command.name, command.schedule, command.times);
  if (command.message > 0) formula.bubble = std::nullopt;
  return formula;
}

std::string time_of_step(const Simulation& simulation) {
  return fmt::format("step {:.6g}, bubble {:.6g}: {:.3g} % of what a rank computes\n", simulation.step_time,
                     simulation.bubble, 100 * simulation.bubble_of_ideal());
}

/// Of a step that has late gradients on all ranks, as the last two of those that are shown have: from STEP to STEP.
std::string time_of_steady_step(const StepProgram& program, const Simulation& simulation) {
  double busiest = 0;
  double begin = 0;
  double end = 0;
  for (const RankTimes& rank : simulation.ranks) {
    int step = 0;
    double busy = 0;
    for (const TimedAction& timed : rank.actions) {
      const bool steady = step == program.most_late() + 1;
      if (steady && (is_computation(timed.action.kind) || timed.action.kind == ActionKind::kRecompute))
        busy += timed.end - timed.begin;
      if (timed.action.kind != ActionKind::kStep) continue;
      if (++step == program.most_late() + 1) begin = timed.end;
      if (step == program.most_late() + 2) end = timed.end;
    }
    busiest = std::max(busiest, busy);
  }
  std::string late;
  for (const int steps : program.late) late += (late.empty() ? "" : ", ") + std::to_string(steps);
  return fmt::format("inexact: gradients of chunks are late by steps: {}\n", late) +
         fmt::format(
             "step {:.6g} once gradients come, of which the busiest rank computes {:.6g}; "
             "shown: {} steps, and what is late after them\n",
             end - begin, busiest, program.most_late() + 2);
}

}  // namespace

StepProgram program_of(const ScheduleCommand& command) {
  StepProgram program = command.program.empty() ? lower(make_schedule(command.name, command.schedule), command.passes)
                                                : parse_program(read_file(command.program));
  verify(program, {.forwards_only = !has_backward(program)});
  return program;
}

StepProgram shown_of(const StepProgram& program) {
  return unrolled(program, program.most_late() + 2);
}

Costs costs_of(const ScheduleCommand& command) {
  return {.chunks = {{.forward = command.times.forward, .input = command.times.input, .weight = command.times.weight}},
          .link = {.latency = command.message}};
}

std::string table_of(const ScheduleCommand& command, const StepProgram& program, const Simulation& simulation) {
  const std::optional<ScheduleFormula> formula = formula_of(command);
  std::string text = program.late.empty() ? time_of_step(simulation) : time_of_steady_step(program, simulation);
  if (formula) {
    text +=
        "formula: bubble " + (formula->bubble ? fmt::format("{:.6g}", *formula->bubble) : "not in closed form here");
    text += ", " + formula->bubble_text + "\n";
  }
  text += fmt::format("{:<6} {:>9} {:>9} {:>12}{}\n", "rank", "computes", "waits", "held at most",
                      formula ? (formula->in_flight_is_exact ? "  formula" : "    bound") : "");
  for (std::size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
    const RankTimes& times = simulation.ranks[rank];
    text += fmt::format("{:<6} {:>9.6g} {:>9.6g} {:>12}", rank, times.busy, times.bubble, times.most_pairs);
    text += formula ? fmt::format("{:>9}\n", formula->in_flight[rank]) : "\n";
  }
  text += program.chunks() > program.ranks() ? "held: micro-batches of a chunk of a rank\n" : "held: micro-batches\n";
  for (const LinkUse& link : simulation.links)
    text += fmt::format("link {} to {}: {} messages\n", link.from, link.to, link.messages);
  return text;
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file)
    throw Error(ErrorCode::kIo, "a file cannot be written: " + errno_text(errno),
                {.where = "zeroth.schedule", .which = path});
}

}  // namespace zeroth::doctor
