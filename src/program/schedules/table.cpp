#include "program/schedules/table.h"

#include "program/schedules/v_rank.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <utility>

namespace zeroth {
namespace schedules {
namespace {

constexpr int kMostRanks = 4096;
constexpr int kMostMicroBatches = 1 << 20;
constexpr int kMostChunks = 1024;  // a rank

constexpr std::array kTable{
    Row{.name = "gpipe", .chunks = Chunks::kOne, .make = gpipe, .formula = gpipe_formula},
    Row{.name = "1f1b",
        .chunks = Chunks::kOne,
        .make = one_forward_one_backward,
        .formula = one_forward_one_backward_formula},
    Row{.name = "interleaved", .chunks = Chunks::kAny, .make = interleaved, .formula = interleaved_formula},
    Row{.name = "zb-h1", .chunks = Chunks::kOne, .make = zb_h1, .formula = zb_h1_formula},
    Row{.name = "zb-h2", .chunks = Chunks::kOne, .make = zb_h2, .formula = zb_h2_formula},
    Row{.name = "zb-v", .chunks = Chunks::kPair, .make = zb_v, .formula = zb_v_formula},
    Row{.name = "v-half", .chunks = Chunks::kPair, .make = v_half, .formula = v_half_formula},
    Row{.name = "v-min", .chunks = Chunks::kPair, .make = v_min, .formula = v_min_formula},
    Row{.name = "dualpipev", .chunks = Chunks::kPair, .make = dual_pipe_v, .formula = dual_pipe_v_formula},
    Row{.name = "ouroboros", .chunks = Chunks::kOne, .make = ouroboros, .formula = ouroboros_formula, .inexact = true},
};

void require(std::string_view name, std::string_view what, int value, int low, int high) {
  ZR_CHECK(value >= low && value <= high, ErrorCode::kUsage, "the schedule has no such number of " + std::string(what),
           {.where = "program.schedules",
            .which = std::string(name),
            .expected = low == high ? std::to_string(low) : std::to_string(low) + " to " + std::to_string(high),
            .got = std::to_string(value)});
}

ScheduleOptions checked(const Row& row, const ScheduleOptions& options) {
  require(row.name, "ranks", options.ranks, 1, kMostRanks);
  require(row.name, "micro-batches", options.micro_batches, 1, kMostMicroBatches);
  ZR_CHECK(options.inexact || !row.inexact, ErrorCode::kUsage,
           "this schedule trains with gradients of older parameters, and nobody has asked for that",
           {.where = "program.schedules", .which = std::string(row.name), .hint = "the option inexact asks for it"});
  ScheduleOptions filled = options;
  const int own = row.chunks == Chunks::kOne ? 1 : 2;
  if (filled.chunks_per_rank == 0) filled.chunks_per_rank = own;
  const bool any = row.chunks == Chunks::kAny;
  require(row.name, "chunks a rank", filled.chunks_per_rank, any ? 1 : own, any ? kMostChunks : own);
  return filled;
}

}  // namespace

std::span<const Row> table() {
  return kTable;
}

const Row& row_of(std::string_view name) {
  for (const Row& row : kTable) {
    if (row.name == name) return row;
  }
  const std::vector<std::string> names = schedule_names(true);
  const std::string nearest = nearest_name(name, names);
  throw Error(ErrorCode::kUsage, "there is no such schedule",
              {.where = "program.schedules",
               .expected = join(names, ", "),
               .got = "\"" + std::string(name.substr(0, 40)) + "\"",
               .hint = nearest.empty() ? "" : "did you mean \"" + nearest + "\"?"});
}

bool are_equal(const ChunkTimes& times) {
  return times.forward == times.input && times.input == times.weight;
}

std::vector<int> on_every_rank(const ScheduleOptions& options, int number) {
  return std::vector<int>(static_cast<std::size_t>(options.ranks), number);
}

StepProgram placed_round(std::string_view name, const ScheduleOptions& options) {
  StepProgram program{.schedule = std::string(name), .micro_batches = options.micro_batches};
  for (int chunk = 0; chunk < options.ranks * options.chunks_per_rank; ++chunk)
    program.rank_of_chunk.push_back(chunk % options.ranks);
  program.actions.resize(static_cast<std::size_t>(options.ranks));
  return program;
}

StepProgram placed_as_v(std::string_view name, const ScheduleOptions& options) {
  StepProgram program = placed_round(name, options);
  for (int rank = 0; rank < options.ranks; ++rank)
    program.rank_of_chunk[static_cast<std::size_t>(2 * options.ranks - 1 - rank)] = rank;
  return program;
}

StepProgram keep_micro_batches(StepProgram program, int micro_batches) {
  program.micro_batches = micro_batches;
  for (std::vector<Action>& actions : program.actions)
    std::erase_if(actions, [&](const Action& action) { return action.micro_batch >= micro_batches; });
  return program;
}

}  // namespace schedules

StepProgram make_schedule(std::string_view name, const ScheduleOptions& options) {
  const schedules::Row& row = schedules::row_of(name);
  return row.make(schedules::checked(row, options));
}

ScheduleFormula schedule_formula(std::string_view name, const ScheduleOptions& options, const ChunkTimes& times) {
  const schedules::Row& row = schedules::row_of(name);
  for (const double time : {times.forward, times.input, times.weight}) {
    ZR_CHECK(std::isfinite(time) && time >= 0, ErrorCode::kUsage, "a time is not usable",
             {.where = "program.schedule_formula", .expected = "finite numbers from 0"});
  }
  return row.formula(schedules::checked(row, options), times);
}

std::vector<std::string> schedule_names(bool inexact) {
  std::vector<std::string> names;
  for (const schedules::Row& row : schedules::table()) {
    if (inexact || !row.inexact) names.emplace_back(row.name);
  }
  return names;
}

}  // namespace zeroth
