#include "support/error_of.h"

#include <zeroth/program/passes.h>
#include <zeroth/program/schedules.h>
#include <zeroth/program/simulate.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <string>
#include <vector>

namespace zeroth {
namespace {

using test::error_of;

StepProgram lowered(const std::string& name, int ranks, int micro_batches, const LowerOptions& options = {}) {
  return lower(make_schedule(name, {.ranks = ranks, .micro_batches = micro_batches}), options);
}

const TimedAction& timed(const Simulation& simulation, int rank, const std::string& action) {
  const std::vector<TimedAction>& actions = simulation.ranks[static_cast<std::size_t>(rank)].actions;
  const auto found = std::ranges::find(actions, parse_action(action), &TimedAction::action);
  EXPECT_NE(found, actions.end()) << action;
  return *found;
}

TEST(ProgramSimulation, ActionsBeginWhenWhatTheyNeedIsThere) {
  // F 2, I 3, W 1; a message occupies its link for 4 and is there 1 later.
  const Costs costs{.chunks = {{.forward = 2, .input = 3, .weight = 1, .output_bytes = 40}},
                    .link = {.latency = 1, .bytes_per_second = 10}};
  const Simulation simulation = simulate(lowered("gpipe", 2, 2), costs);
  EXPECT_EQ(timed(simulation, 0, "0F1").end, 4);
  EXPECT_EQ(timed(simulation, 1, "1RECV_F0").end, 2 + 4 + 1);
  EXPECT_EQ(timed(simulation, 1, "1F0").begin, 7);
  // The second message is ready at 4, but its link is free at 6 only.
  EXPECT_EQ(timed(simulation, 1, "1RECV_F1").end, 6 + 4 + 1);
  EXPECT_EQ(timed(simulation, 1, "1F1").end, 13);
  EXPECT_EQ(timed(simulation, 1, "1B0").end, 17);
  EXPECT_EQ(timed(simulation, 0, "0B0").begin, 17 + 4 + 1);
  EXPECT_EQ(timed(simulation, 0, "0B1").begin, 26);  // the first backward lasts until then; its own message came at 26
  EXPECT_EQ(simulation.step_time, 30);
  EXPECT_EQ(simulation.ranks[0].busy, 12);
  EXPECT_EQ(simulation.ranks[0].bubble, 30 - 12);
  EXPECT_EQ(simulation.ranks[1].bubble, 21 - 7 - 12);
  ASSERT_EQ(simulation.links.size(), 2U);
  EXPECT_EQ(simulation.links[0].messages, 2);
  EXPECT_EQ(simulation.links[0].bytes, 80);
  EXPECT_EQ(simulation.links[0].busy, 8);
  EXPECT_EQ(simulation.links[1].from, 1);
}

TEST(ProgramSimulation, ChunksLinksAndSpeedsMayBeUnlike) {
  Costs costs{.chunks = {{.forward = 1}, {.forward = 5}}, .speeds = {1, 2}};
  costs.links[{0, 1}] = {.latency = 7};
  const Simulation simulation = simulate(lowered("gpipe", 2, 1), costs);
  EXPECT_EQ(timed(simulation, 1, "1F0").begin, 1 + 7);
  EXPECT_EQ(timed(simulation, 1, "1F0").end, 8 + 2.5);
  EXPECT_EQ(timed(simulation, 1, "1B0").end, 10.5 + 1);
  EXPECT_EQ(timed(simulation, 0, "0B0").begin, 11.5);  // the way back has no latency
}

TEST(ProgramSimulation, GathersReductionsAndCopiesRunBesideComputations) {
  const Costs costs{.chunks = {{.unshard = 4, .reduce = 5, .copy = 0.5}}, .step = 2};
  const Simulation simulation =
      simulate(lowered("gpipe", 1, 2, {.gathers = Gathers::kKept, .offload_activations = true}), costs);
  EXPECT_EQ(timed(simulation, 0, "0F0").begin, 4);
  EXPECT_EQ(timed(simulation, 0, "0F1").begin, 5);
  EXPECT_EQ(timed(simulation, 0, "0FLUSH0").begin, 5);
  // FETCH comes after the two FLUSH, of which the second ends at 6.5.
  EXPECT_EQ(timed(simulation, 0, "0FETCH0").end, 7);
  EXPECT_EQ(timed(simulation, 0, "0B0").begin, 7);
  EXPECT_EQ(timed(simulation, 0, "0REDUCE").end, timed(simulation, 0, "0B1").end + 5);
  EXPECT_EQ(timed(simulation, 0, "STEP").begin, timed(simulation, 0, "0REDUCE").end);
  EXPECT_EQ(simulation.step_time, timed(simulation, 0, "STEP").begin + 2);
}

TEST(ProgramSimulation, AllRanksStepTogether) {
  const Simulation simulation = simulate(lowered("zb-h2", 3, 6), {.step = 3});
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(timed(simulation, rank, "STEP").begin, 6 * 3 + 2);
    EXPECT_EQ(timed(simulation, rank, "STEP").end, 6 * 3 + 2 + 3);
  }
  EXPECT_EQ(simulation.bubble, 0);  // the wait for the step is none
}

TEST(ProgramSimulation, BytesAreHeldFromForwardToBackward) {
  const Costs costs{.chunks = {{.activation_bytes = 10, .weight_bytes = 4}}};
  const Simulation whole = simulate(lowered("1f1b", 3, 9), costs);
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_EQ(whole.ranks[static_cast<std::size_t>(rank)].most_bytes, 10 * (3 - rank));
  // ZB-H1 keeps what W needs: rank r has p - r pairs before their I, and r before their W.
  const Simulation cut = simulate(lowered("zb-h1", 3, 9), costs);
  for (int rank = 0; rank < 3; ++rank) {
    const auto& times = cut.ranks[static_cast<std::size_t>(rank)];
    EXPECT_EQ(times.most_pairs, 3);
    EXPECT_EQ(times.most_bytes, 10 * (3 - rank) + 4 * rank);
    EXPECT_EQ(times.live.back().pairs, 0);
    EXPECT_EQ(times.live.back().bytes, 0);
  }
}

/// The times of all computations, by looking again and again at what each needs: no code of the simulator.
double naive_step_time(const StepProgram& schedule, double latency) {
  std::map<std::string, double> ends;
  std::vector<std::size_t> next(schedule.actions.size(), 0);
  std::vector<double> now(schedule.actions.size(), 0);
  const auto key = [](char kind, int chunk, int m) { return kind + std::to_string(chunk) + "." + std::to_string(m); };
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t rank = 0; rank < next.size(); ++rank) {
      while (next[rank] < schedule.actions[rank].size()) {
        const Action& action = schedule.actions[rank][next[rank]];
        const bool forward = action.kind == ActionKind::kForward;
        double begin = now[rank];
        bool ready = true;
        const int other = forward ? action.chunk - 1 : action.chunk + 1;
        if (action.kind != ActionKind::kBackwardWeight && other >= 0 && other < schedule.chunks()) {
          const auto end = ends.find(key(forward ? 'F' : 'G', other, action.micro_batch));
          ready = end != ends.end();
          const auto home = static_cast<std::size_t>(schedule.rank_of_chunk[static_cast<std::size_t>(other)]);
          if (ready) begin = std::max(begin, end->second + (home == rank ? 0 : latency));
        }
        if (!ready) break;
        now[rank] = begin + (action.kind == ActionKind::kBackward ? 2 : 1);
        ends[key(forward                                      ? 'F'
                 : action.kind == ActionKind::kBackwardWeight ? 'W'
                                                              : 'G',
                 action.chunk, action.micro_batch)] = now[rank];
        ++next[rank];
        moved = true;
      }
    }
  }
  return *std::ranges::max_element(now);
}

TEST(ProgramSimulation, TimesAreThoseOfANaiveOne) {
  for (const std::string& name : schedule_names()) {
    for (const int p : {1, 2, 3, 4}) {
      for (const int m : {1, 3, 4, 9}) {
        for (const double latency : {0.0, 0.5, 3.0}) {
          const StepProgram schedule = make_schedule(name, {.ranks = p, .micro_batches = m});
          EXPECT_EQ(simulate(lower(schedule), {.link = {.latency = latency}}).step_time,
                    naive_step_time(schedule, latency))
              << name << " " << p << " " << m << " " << latency;
        }
      }
    }
  }
}

TEST(ProgramSimulation, RefusesWhatTheVerifierRefutesAndCostsThatAreNone) {
  const StepProgram program = lowered("1f1b", 2, 2);
  const auto error = [](const StepProgram& broken, const Costs& costs) {
    return error_of(ErrorCode::kUsage, [&] { (void)simulate(broken, costs); });
  };
  EXPECT_NE(error(make_schedule("1f1b", {.ranks = 2, .micro_batches = 2}), {}).find("never received"),
            std::string::npos);
  EXPECT_NE(error(program, {.chunks = std::vector<ChunkCosts>(3)}).find("as many costs as chunks"), std::string::npos);
  EXPECT_NE(error(program, {.speeds = {1}}).find("as many speeds as ranks"), std::string::npos);
  EXPECT_NE(error(program, {.speeds = {1, 0}}).find("a speed is not usable"), std::string::npos);
  EXPECT_NE(error(program, {.chunks = {{.forward = -1}}}).find("a cost is not usable"), std::string::npos);
  EXPECT_NE(error(program, {.chunks = {{.output_bytes = -1}}}).find("a cost is not usable"), std::string::npos);
  EXPECT_NE(error(program, {.link = {.latency = std::numeric_limits<double>::infinity()}}).find("a cost is not usable"),
            std::string::npos);
  EXPECT_EQ(simulate(only_forwards(program)).step_time, 3);
}

TEST(ProgramPictures, TextHasAColumnAUnit) {
  const StepProgram program = lowered("zb-v", 2, 2);
  EXPECT_EQ(text_picture(program, simulate(program)),
            "rank 0  F0 F1    f0 i0 w0 f1 i1 w1 I0 W0    I1 W1\n"
            "rank 1     F0 f0 F1 f1 i0 w0 I0 W0 i1 w1 I1 W1\n");
}

TEST(ProgramPictures, SvgHasABoxForEachComputation) {
  const StepProgram program = lowered("1f1b", 3, 4, {.gathers = Gathers::kPerMicroBatch});
  const std::string svg = svg_picture(program, simulate(program));
  std::size_t boxes = 0;
  for (std::size_t at = svg.find("<title>"); at != std::string::npos; at = svg.find("<title>", at + 1)) ++boxes;
  EXPECT_EQ(boxes, 3U * 4 * 2 + 2);  // and two of the legend
  EXPECT_NE(svg.find("<title>2B3 "), std::string::npos);
  EXPECT_TRUE(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
  StepProgram strange = program;
  strange.schedule = "<script>\"&";
  EXPECT_NE(svg_picture(strange, simulate(strange)).find("_script___, 3 ranks"), std::string::npos);
  EXPECT_NE(error_of(ErrorCode::kUsage,
                     [] {
                       const StepProgram large = lowered("gpipe", 65, 1);
                       (void)svg_picture(large, simulate(large));
                     })
                .find("too large for a picture"),
            std::string::npos);
}

TEST(ProgramPictures, TraceHasAnEventForEachAction) {
  const StepProgram program = lowered("gpipe", 2, 2);
  const std::string trace = chrome_trace(program, simulate(program), 1000);
  EXPECT_NE(trace.find(R"({"ph": "X", "name": "1F0", "cat": "F", "pid": 1, "tid": 0, "ts": 1000, "dur": 1000},)"),
            std::string::npos);
  EXPECT_NE(trace.find(R"("name": "0SEND_F0", "cat": "SEND_F", "pid": 0, "tid": 1)"), std::string::npos);
  EXPECT_NE(
      trace.find(R"({"ph": "C", "name": "activations", "pid": 0, "ts": 1000, "args": {"pairs": 2, "bytes": 2}},)"),
      std::string::npos);
}

}  // namespace
}  // namespace zeroth
