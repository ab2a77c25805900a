// A split output layer, late gradients, chunks that need each other.
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
#include <utility>
#include <vector>

namespace zeroth {
namespace {

StepProgram split(const std::string& name, int ranks, int micro_batches, Vocabulary vocabulary) {
  return lower(make_schedule(name, {.ranks = ranks, .micro_batches = micro_batches}), {.vocabulary = vocabulary});
}

TEST(ProgramVocabulary, IsPassedByTheVerifierInEverySchedule) {
  for (const std::string& name : schedule_names()) {
    for (int p = 1; p <= 4; ++p) {
      for (int m = 1; m <= 8; ++m) {
        for (const Vocabulary vocabulary : {Vocabulary::kOneBarrier, Vocabulary::kTwoBarriers}) {
          const StepProgram program = split(name, p, m, vocabulary);
          const auto refutation = refute(program);
          ASSERT_FALSE(refutation.has_value()) << refutation->what << "\n" << to_text(program);
        }
      }
    }
  }
}

TEST(ProgramVocabulary, HoldsOneOrTwoMicroBatchesMore) {
  for (int p = 2; p <= 6; ++p) {
    for (int rank = 0; rank < p; ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      EXPECT_EQ(simulate(split("1f1b", p, 20, Vocabulary::kTwoBarriers)).ranks[at].most_pairs, p - rank + 2);
      EXPECT_EQ(simulate(split("1f1b", p, 20, Vocabulary::kOneBarrier)).ranks[at].most_pairs, p - rank + 1);
    }
    // Two chunks a rank: one more pair of each.
    const int half = schedule_formula("v-half", {.ranks = p, .micro_batches = 20}).in_flight.front();
    EXPECT_EQ(simulate(split("v-half", p, 20, Vocabulary::kOneBarrier)).ranks[0].most_pairs, half + 2);
  }
}

TEST(ProgramVocabulary, EvensOutTheTimesOfTheRanks) {
  // A layer of 3 units a micro-batch, and an output layer as large as a stage: V / (12 h + 2 s) layers.
  constexpr int kRanks = 4;
  constexpr int kMicroBatches = 32;
  for (const std::string& name : schedule_names()) {
    const StepProgram plain = lower(make_schedule(name, {.ranks = kRanks, .micro_batches = kMicroBatches}));
    Costs uneven{.chunks = std::vector<ChunkCosts>(plain.rank_of_chunk.size())};
    uneven.chunks.back() = {.forward = 2, .input = 2, .weight = 2};
    const Simulation before = simulate(plain, uneven);
    // The same work in passes on every rank: S has the forward, T both gradients.
    const Costs even{.vocabulary_scores = 1.0 / kRanks, .vocabulary_gradients = 2.0 / kRanks};
    const Simulation after = simulate(split(name, kRanks, kMicroBatches, Vocabulary::kTwoBarriers), even);
    const auto spread = [](const Simulation& simulation) {
      const auto [least, most] = std::ranges::minmax_element(simulation.ranks, {}, &RankTimes::busy);
      return most->busy - least->busy;
    };
    EXPECT_EQ(spread(before), 3.0 * kMicroBatches) << name;
    EXPECT_EQ(spread(after), 0) << name;
    EXPECT_LT(after.step_time, 0.95 * before.step_time) << name;
  }
}

TEST(ProgramVocabulary, CostsNoMoreWaitsThanTheSchedule) {
  for (const char* name : {"1f1b", "zb-h1", "zb-h2", "interleaved"}) {
    for (const int p : {2, 3, 4}) {
      const double plain = schedule_formula(name, {.ranks = p, .micro_batches = 4 * p}).bubble.value();
      for (const Vocabulary vocabulary : {Vocabulary::kOneBarrier, Vocabulary::kTwoBarriers})
        EXPECT_LE(simulate(split(name, p, 4 * p, vocabulary)).bubble, plain) << name << " " << p;
    }
  }
}

/// A scalar model of one weight a rank, y = w x, trained as a program says: the executor of this test. The loss of a
/// micro-batch is y * target; its gradient is target.
std::vector<std::vector<double>> trained(const StepProgram& program, const std::vector<double>& targets) {
  const int ranks = program.ranks();
  std::vector<double> weights(static_cast<std::size_t>(ranks), 1.0);
  std::vector<std::vector<double>> history(weights.size());
  std::vector<double> gradients(weights.size(), 0.0);
  std::map<std::pair<int, int>, double> inputs;
  std::map<std::pair<int, int>, double> used;  // weights at the forward
  std::map<std::pair<int, int>, double> outer;
  std::vector<std::size_t> next(weights.size(), 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      while (next[at] < program.actions[at].size()) {
        const Action& action = program.actions[at][next[at]];
        const std::pair pair{rank, action.micro_batch};
        if (action.kind == ActionKind::kForward) {
          if (rank > 0 && !inputs.contains(pair)) break;
          if (rank == 0) inputs[pair] = 1 + 0.1 * action.micro_batch;
          used[pair] = weights[at];
          inputs[{rank + 1, action.micro_batch}] = weights[at] * inputs[pair];
        } else if (action.kind == ActionKind::kBackward) {
          if (rank == ranks - 1) outer[pair] = targets[static_cast<std::size_t>(action.micro_batch)];
          if (!outer.contains(pair)) break;
          gradients[at] += outer[pair] * inputs[pair];
          outer[{rank - 1, action.micro_batch}] = outer[pair] * used[pair];
        } else if (action.kind == ActionKind::kStep) {
          weights[at] -= 0.01 * std::exchange(gradients[at], 0.0);
          history[at].push_back(weights[at]);
        }
        ++next[at];
        moved = true;
      }
    }
  }
  return history;
}

TEST(ProgramOuroboros, GradientsAreThoseOfALateReference) {
  constexpr int kSteps = 12;
  std::vector<double> targets;
  for (int m = 0; m < kSteps; ++m) targets.push_back(0.3 + 0.05 * (m % 5));
  const StepProgram program = make_schedule("ouroboros", {.ranks = 2, .micro_batches = kSteps, .inexact = true});
  const auto history = trained(program, targets);
  // By hand, for two ranks: the second steps with its gradient at once; the first one step later, with the weights of
  // then. Its forward of micro-batch t + 1 comes before its step t.
  double first = 1;
  double first_before = 1;
  double second = 1;
  for (int t = 0; t < kSteps; ++t) {
    const double x = 1 + 0.1 * t;
    const double used = t == 0 ? first : first_before;  // the step t - 1 came after this forward
    const double through = second;
    second -= 0.01 * targets[static_cast<std::size_t>(t)] * used * x;
    first_before = first;
    first -= 0.01 * targets[static_cast<std::size_t>(t)] * through * x;
    EXPECT_DOUBLE_EQ(history[1][static_cast<std::size_t>(t)], second) << t;
    EXPECT_DOUBLE_EQ(history[0][static_cast<std::size_t>(t)], first) << t;
  }
}

TEST(ProgramOuroboros, IsInexactAndHasNoWaitsButTheFirstAndLast) {
  for (int p = 1; p <= 4; ++p) {
    for (const int steps : {2 * p, 3 * p, 10 * p}) {
      const StepProgram program =
          lower(make_schedule("ouroboros", {.ranks = p, .micro_batches = steps, .inexact = true}));
      EXPECT_TRUE(program.inexact);
      EXPECT_TRUE(parse_program(to_text(program)).inexact);
      const Simulation simulation = simulate(program);
      EXPECT_EQ(simulation.bubble, 3 * (p - 1));  // of all steps together
      // From the first backward to the last forward of rank 0 there is none.
      const std::vector<TimedAction>& actions = simulation.ranks[0].actions;
      double end = -1;
      for (const TimedAction& timed : actions) {
        if (!is_computation(timed.action.kind)) continue;
        if (end < 0 && timed.action.kind == ActionKind::kBackward) end = timed.begin;
        if (end < 0) continue;
        EXPECT_EQ(timed.begin, end) << to_text(timed.action);
        end = timed.end;
        if (timed.action == Action{.kind = ActionKind::kForward, .chunk = 0, .micro_batch = steps - 1}) break;
      }
    }
  }
}

TEST(ProgramOuroboros, AnExactProgramStepsOnce) {
  StepProgram program = lower(make_schedule("ouroboros", {.ranks = 2, .micro_batches = 4, .inexact = true}));
  EXPECT_FALSE(refute(program).has_value());
  program.inexact = false;
  const auto refutation = refute(program);
  ASSERT_TRUE(refutation.has_value());
  EXPECT_NE(refutation->what.find("after the step"), std::string::npos);
}

Dependence after(const std::string& first, const std::string& then) {
  return {.first = parse_action(first), .then = parse_action(then)};
}

/// Layers of a graph network, whose micro-batches are chunks of one graph: the forward of a chunk needs the layer
/// before of all chunks of the graph (exact), or of those that came earlier (the rest from the last epoch).
std::vector<Dependence> graph_dependences(int layers, int chunks_of_graph, bool exact) {
  std::vector<Dependence> dependences;
  for (int layer = 1; layer < layers; ++layer) {
    for (int m = 0; m < chunks_of_graph; ++m) {
      for (int other = 0; other < (exact ? chunks_of_graph : m); ++other) {
        if (other != m)
          dependences.push_back({.first = {.kind = ActionKind::kForward, .chunk = layer - 1, .micro_batch = other},
                                 .then = {.kind = ActionKind::kForward, .chunk = layer, .micro_batch = m}});
      }
    }
  }
  return dependences;
}

TEST(ProgramDependences, ChunksOfAGraphThatNeedAllOthersWaitForAWholeLayer) {
  constexpr int kLayers = 3;
  constexpr int kChunks = 4;
  const StepProgram program = lower(make_schedule("gpipe", {.ranks = kLayers, .micro_batches = kChunks}));
  const auto time = [&](bool exact) {
    return simulate(program, {.dependences = graph_dependences(kLayers, kChunks, exact)}).step_time;
  };
  // With values of the last epoch it is a pipeline; without them, layer after layer.
  EXPECT_EQ(time(false), simulate(program).step_time);
  EXPECT_EQ(time(true), kLayers * kChunks + 2 * (kChunks + kLayers - 1));
  EXPECT_FALSE(refute(program, {.dependences = graph_dependences(kLayers, kChunks, true)}).has_value());
}

TEST(ProgramDependences, ASchedulesOrderMayContradictThem) {
  // 1F1B begins a backward before it has all forwards.
  const StepProgram program = lower(make_schedule("1f1b", {.ranks = 2, .micro_batches = 4}));
  const auto refutation = refute(program, {.dependences = graph_dependences(2, 4, true)});
  ASSERT_TRUE(refutation.has_value());
  ASSERT_EQ(refutation->places.size(), 2U);
  EXPECT_EQ(refutation->places[0], (Refutation::Place{.rank = 0, .index = 4, .action = "0RECV_B0"}));
  EXPECT_EQ(refutation->places[1], (Refutation::Place{.rank = 1, .index = 1, .action = "1F0"}));
  EXPECT_NE(refutation->expected.find("1SEND_B0 on rank 1"), std::string::npos);
}

TEST(ProgramDependences, AreOfComputationsThatAreThere) {
  const StepProgram program = lower(make_schedule("1f1b", {.ranks = 2, .micro_batches = 2}));
  for (const auto& dependence :
       {after("0F0", "1F7"), after("0F0", "1I0"), after("0SEND_F0", "1F0"), after("5F0", "1F0")}) {
    EXPECT_NE(test::error_of(ErrorCode::kUsage, [&] { (void)refute(program, {.dependences = {dependence}}); })
                  .find("a computation that the program does not have"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace zeroth
