#include "oracle.h"
#include "support/error_of.h"

#include <zeroth/program/passes.h>
#include <zeroth/program/schedules.h>
#include <zeroth/program/simulate.h>
#include <zeroth/program/verify.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace zeroth {
namespace {

using test::error_of;

std::vector<int> chunk_counts(const std::string& name, int most) {
  if (name != "interleaved") return {0};
  std::vector<int> counts;
  for (int count = 1; count <= most; ++count) counts.push_back(count);
  return counts;
}

struct Grid {
  int ranks;
  int micro_batches;
  int chunks;
};

/// Calls `call` with the name and options of every schedule of the grid.
template <class Call>
void for_all(const Grid& grid, const Call& call) {
  for (const std::string& name : schedule_names(true)) {
    for (int ranks = 1; ranks <= grid.ranks; ++ranks) {
      for (int micro_batches = 1; micro_batches <= grid.micro_batches; ++micro_batches) {
        for (const int chunks : chunk_counts(name, grid.chunks)) {
          SCOPED_TRACE(name + ", " + std::to_string(ranks) + " ranks, " + std::to_string(micro_batches) +
                       " micro-batches, " + std::to_string(chunks) + " chunks a rank");
          call(name, ScheduleOptions{
                         .ranks = ranks, .micro_batches = micro_batches, .chunks_per_rank = chunks, .inexact = true});
        }
      }
    }
  }
}

/// The verifier passes it, within its bound of activations, and an executor without the verifier runs it.
void expect_well(const std::string& name, const ScheduleOptions& options) {
  const ScheduleFormula formula = schedule_formula(name, options);
  for (const Gathers gathers : {Gathers::kNone, Gathers::kPerMicroBatch, Gathers::kKept}) {
    const StepProgram program = lower(make_schedule(name, options), {.gathers = gathers});
    const auto refutation = refute(program, {.in_flight = formula.in_flight});
    ASSERT_FALSE(refutation.has_value()) << refutation->what << "\n" << to_text(program);
    if (!program.inexact) {  // the executor knows one step
      ASSERT_EQ(test::run_by_queues(program), "") << to_text(program);
    }
    const StepProgram forwards = only_forwards(program);
    ASSERT_FALSE(refute(forwards, {.forwards_only = true}).has_value()) << to_text(forwards);
  }
}

/// The simulation waits and holds exactly what the formulas say.
void expect_formula(const std::string& name, const ScheduleOptions& options, const ChunkTimes& times) {
  const StepProgram program = lower(make_schedule(name, options));
  const Simulation simulation =
      simulate(unrolled(program, program.most_late() + 2),
               {.chunks = {{.forward = times.forward, .input = times.input, .weight = times.weight}},
                .steps_meet = program.most_late() > 0});
  const ScheduleFormula formula = schedule_formula(name, options, times);
  if (formula.bubble) {
    EXPECT_EQ(simulation.bubble, *formula.bubble);
  }
  int most = 0;
  for (std::size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
    const int held = simulation.ranks[rank].most_pairs;
    most = std::max(most, held);
    if (formula.in_flight_is_exact) {
      EXPECT_EQ(held, formula.in_flight[rank]) << "rank " << rank;
    } else {
      EXPECT_LE(held, formula.in_flight[rank]) << "rank " << rank;
    }
  }
  if (options.micro_batches >= 2 * options.ranks) {
    EXPECT_EQ(most, std::ranges::max(formula.in_flight));
  }
}

const std::vector<ChunkTimes> kTimes{{1, 1, 1}, {2, 3, 1}, {3, 2, 2}, {1, 1, 2}};

TEST(ProgramSchedules, ArePassedByTheVerifierAndRunWell) {
  for_all({.ranks = 4, .micro_batches = 8, .chunks = 2}, expect_well);
}

TEST(LongProgramSchedules, ArePassedByTheVerifierAndRunWell) {
  for_all({.ranks = 8, .micro_batches = 20, .chunks = 4}, expect_well);
}

TEST(ProgramSchedules, WaitAndHoldWhatTheFormulasSay) {
  for_all({.ranks = 4, .micro_batches = 8, .chunks = 4}, [](const std::string& name, const ScheduleOptions& options) {
    for (const ChunkTimes& times : kTimes) expect_formula(name, options, times);
  });
}

TEST(LongProgramSchedules, WaitAndHoldWhatTheFormulasSay) {
  for_all({.ranks = 12, .micro_batches = 30, .chunks = 4}, [](const std::string& name, const ScheduleOptions& options) {
    for (const ChunkTimes& times : kTimes) expect_formula(name, options, times);
  });
}

/// Where a formula gives a bubble, and what it is with F = I = W = 1. These are the closed forms of the papers.
TEST(ProgramSchedules, FormulasAreThoseOfThePapers) {
  const auto bubble = [](const std::string& name, int p, int m, const ChunkTimes& times, int chunks = 0) {
    return schedule_formula(name, {.ranks = p, .micro_batches = m, .chunks_per_rank = chunks}, times).bubble;
  };
  const auto held = [](const std::string& name, int p, int m, int chunks = 0) {
    return schedule_formula(name, {.ranks = p, .micro_batches = m, .chunks_per_rank = chunks}).in_flight;
  };
  const ChunkTimes equal;
  const ChunkTimes unlike{.forward = 4, .input = 5, .weight = 3};
  for (int p = 1; p <= 8; ++p) {
    for (const int m : {2 * p, 3 * p}) {
      EXPECT_EQ(bubble("gpipe", p, m, unlike), (p - 1) * (4 + 5 + 3));
      EXPECT_EQ(bubble("1f1b", p, m, unlike), (p - 1) * (4 + 5 + 3));
      // The time of a chunk is 1 / v of that of a stage: (p - 1) / (v m) of the ideal time m v (F + I + W).
      for (int v = 1; v <= 4; ++v) EXPECT_EQ(bubble("interleaved", p, m, unlike, v), (p - 1) * (4 + 5 + 3));
      EXPECT_EQ(bubble("zb-h1", p, m, unlike), (p - 1) * (4 + 5 - 3));
      EXPECT_EQ(bubble("zb-h2", p, m, unlike), (p - 1) * (4 + 5 - 2 * 3));
      EXPECT_EQ(bubble("zb-v", p, m, equal), 0);
      // A half and two thirds of that of 1F1B, 6 (p - 1) in the time of a chunk, within one of them.
      EXPECT_LE(*bubble("v-half", p, m, equal), 6.0 * (p - 1) / 2);
      EXPECT_LE(*bubble("v-min", p, m, equal), 6.0 * (p - 1) * 2 / 3 + 1);
      // DualPipeV: (p - 1)(F&B + B - 3W) bounds it, with F&B = F + B.
      EXPECT_LE(*bubble("dualpipev", p, m, equal), (p - 1) * (3 + 2 - 3));
    }
    EXPECT_EQ(held("gpipe", p, 20), std::vector<int>(static_cast<std::size_t>(p), 20));
    EXPECT_EQ(held("1f1b", p, 20).front(), p);
    EXPECT_EQ(held("1f1b", p, 20).back(), 1);
    for (int v = 2; v <= 4; ++v) EXPECT_EQ(held("interleaved", p, 4 * p, v).front(), p * v + p - 1);
    // In pairs of chunk and micro-batch, two chunks a rank: 2p is as much as 1F1B.
    EXPECT_EQ(held("zb-h1", p, 20).front(), p);
    EXPECT_EQ(held("zb-h2", p, 20).front(), 2 * p - 1);
    EXPECT_EQ(held("zb-v", p, 20).front(), 2 * p);
    EXPECT_LE(held("v-half", p, 20).front(), p + 2);
    EXPECT_LE(held("v-min", p, 20).front(), 2 * p / 3 + 3);
    EXPECT_EQ(held("dualpipev", p, 20).front(), 2 * p + 1);
  }
}

TEST(ProgramSchedules, BubbleOfInterleavedIsAShareOfTheIdeal) {
  for (int p = 2; p <= 4; ++p) {
    for (int v = 1; v <= 4; ++v) {
      const int m = 2 * p;
      const Simulation simulation =
          simulate(lower(make_schedule("interleaved", {.ranks = p, .micro_batches = m, .chunks_per_rank = v})));
      EXPECT_DOUBLE_EQ(simulation.bubble_of_ideal(), static_cast<double>(p - 1) / (v * m));
    }
  }
  const Simulation gpipe = simulate(lower(make_schedule("gpipe", {.ranks = 4, .micro_batches = 8})));
  EXPECT_DOUBLE_EQ(gpipe.bubble / gpipe.step_time, 3.0 / 11);  // (p - 1) / (m + p - 1) of the whole
}

TEST(ProgramSchedules, PlacesAreRoundOrAsAV) {
  EXPECT_EQ(make_schedule("interleaved", {.ranks = 3, .micro_batches = 1}).rank_of_chunk,
            (std::vector<int>{0, 1, 2, 0, 1, 2}));
  for (const char* name : {"zb-v", "v-half", "v-min", "dualpipev"})
    EXPECT_EQ(make_schedule(name, {.ranks = 3, .micro_batches = 1}).rank_of_chunk,
              (std::vector<int>{0, 1, 2, 2, 1, 0}));
}

TEST(ProgramSchedules, OneChunkARankInterleavedIsOneForwardOneBackward) {
  for (const int m : {1, 3, 8}) {
    EXPECT_EQ(make_schedule("interleaved", {.ranks = 4, .micro_batches = m, .chunks_per_rank = 1}).actions,
              make_schedule("1f1b", {.ranks = 4, .micro_batches = m}).actions);
  }
}

TEST(ProgramSchedules, RefuseWhatTheyDoNotHave) {
  const auto error = [](const std::string& name, const ScheduleOptions& options) {
    return error_of(ErrorCode::kUsage, [&] { (void)make_schedule(name, options); });
  };
  EXPECT_NE(error("1f1c", {}).find("hint: did you mean \"1f1b\"?"), std::string::npos);
  EXPECT_NE(error("gpipe", {.ranks = 0}).find("no such number of ranks"), std::string::npos);
  EXPECT_NE(error("gpipe", {.micro_batches = 0}).find("no such number of micro-batches"), std::string::npos);
  EXPECT_NE(error("gpipe", {.chunks_per_rank = 2})
                .find("chunks a rank; where: program.schedules; which: gpipe; expected: 1; got: 2"),
            std::string::npos);
  EXPECT_NE(error("zb-v", {.chunks_per_rank = 3}).find("expected: 2; got: 3"), std::string::npos);
  EXPECT_NE(error("interleaved", {.chunks_per_rank = -1}).find("got: -1"), std::string::npos);
  EXPECT_NE(error("ouroboros", {}).find("gradients of older parameters"), std::string::npos);
}

}  // namespace
}  // namespace zeroth
