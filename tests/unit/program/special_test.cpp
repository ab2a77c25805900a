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
        } else if (action.kind == ActionKind::kRecompute) {
          used[pair] = weights[at];
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

StepProgram late_program(int ranks, int micro_batches) {
  return lower(make_schedule("ouroboros", {.ranks = ranks, .micro_batches = micro_batches, .inexact = true}));
}

/// By hand: in step t rank r of p uses the inputs of step t - (p - 1 - r), its weights of now, and what rank r + 1 sent
/// in the step before.
std::vector<std::vector<double>> late_reference(int ranks, int micro_batches, int steps,
                                                const std::vector<double>& targets) {
  const auto p = static_cast<std::size_t>(ranks);
  std::vector<double> weights(p, 1.0);
  std::vector<std::vector<double>> history(p);
  std::map<std::pair<std::size_t, int>, double> inputs;  // of rank and number of the micro-batch
  std::map<std::pair<std::size_t, int>, double> sent;    // by the rank
  for (int t = 0; t < steps; ++t) {
    for (int number = t * micro_batches; number < (t + 1) * micro_batches; ++number) {
      double value = 1 + 0.1 * number;
      for (std::size_t rank = 0; rank < p; ++rank) {
        inputs[{rank, number}] = value;
        value *= weights[rank];
      }
      sent[{p, number}] = targets[static_cast<std::size_t>(number)];
    }
    std::vector<double> gradients(p, 0.0);
    for (std::size_t rank = 0; rank < p; ++rank) {
      const int from = t - static_cast<int>(p - 1 - rank);
      for (int number = from * micro_batches; from >= 0 && number < (from + 1) * micro_batches; ++number) {
        gradients[rank] += sent.at({rank + 1, number}) * inputs.at({rank, number});
        sent[{rank, number}] = sent.at({rank + 1, number}) * weights[rank];
      }
    }
    for (std::size_t rank = 0; rank < p; ++rank) history[rank].push_back(weights[rank] -= 0.01 * gradients[rank]);
  }
  return history;
}

TEST(ProgramOuroboros, GradientsAreThoseOfALateReference) {
  constexpr int kSteps = 9;
  std::vector<double> targets;
  for (int m = 0; m < 3 * kSteps; ++m) targets.push_back(0.3 + 0.05 * (m % 5));
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int micro_batches : {1, 3}) {
      const auto history = trained(unrolled(late_program(ranks, micro_batches), kSteps), targets);
      const auto reference = late_reference(ranks, micro_batches, kSteps, targets);
      for (std::size_t rank = 0; rank < history.size(); ++rank) {
        for (std::size_t t = 0; t < kSteps; ++t)
          EXPECT_DOUBLE_EQ(history[rank][t], reference[rank][t]) << ranks << " ranks, rank " << rank << ", step " << t;
      }
    }
  }
}

/// From the end of a step to that of the next one, of steps in which all ranks have late gradients; at most.
double steady_step(const StepProgram& program, const Costs& costs) {
  const int steps = program.most_late() + 4;
  const Simulation simulation = simulate(unrolled(program, steps), costs);
  double longest = 0;
  for (const RankTimes& rank : simulation.ranks) {
    std::vector<double> ends;
    for (const TimedAction& timed : rank.actions)
      if (timed.action.kind == ActionKind::kStep) ends.push_back(timed.end);
    for (std::size_t step = static_cast<std::size_t>(program.most_late()) + 1; std::cmp_less(step, steps); ++step)
      longest = std::max(longest, ends[step] - ends[step - 1]);
  }
  return longest;
}

TEST(ProgramOuroboros, ASteadyStepTakesWhatTheBusiestRankComputes) {
  for (int p = 2; p <= 5; ++p) {
    for (const int m : {3 * p, 4 * p}) {
      const StepProgram program = late_program(p, m);
      EXPECT_EQ(steady_step(program, {.steps_meet = true}), 4 * m) << p << " ranks";  // F, RECOMPUTE, B
      // If the last rank has more layers, until all compute alike: the way of the first forward through the others.
      Costs alike{.chunks = std::vector<ChunkCosts>(static_cast<std::size_t>(p)), .steps_meet = true};
      alike.chunks.back() = {.forward = 2, .input = 1, .weight = 1};
      EXPECT_EQ(steady_step(program, alike), 4 * m + 3 * std::max(0, p - 2) + 1) << p << " ranks";
      const StepProgram exact = lower(make_schedule("1f1b", {.ranks = p, .micro_batches = m}), {.recompute = true});
      EXPECT_GT(simulate(exact, alike).step_time, steady_step(program, alike)) << p << " ranks";
    }
  }
}

TEST(ProgramOuroboros, IsOneStepWithMicroBatchesOfEarlierOnes) {
  const StepProgram program = late_program(2, 2);
  EXPECT_EQ(to_text(program),
            "zeroth-program 1 schedule=ouroboros ranks=2 micro_batches=2 chunks=0,1 late=1,0 inexact\n"
            "0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECOMPUTE0 0B0 0RECOMPUTE1 0B1 0REDUCE 0RECV_B0 0RECV_B1 STEP\n"
            "1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE STEP\n");
  EXPECT_EQ(parse_program(to_text(program)), program);
  EXPECT_EQ(to_text(unrolled(program, 1)),
            "zeroth-program 1 schedule=ouroboros ranks=2 micro_batches=2 chunks=0,1 inexact\n"
            "0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 STEP 0RECOMPUTE0 0B0 0RECOMPUTE1 0B1 0REDUCE STEP\n"
            "1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE STEP STEP\n");
  EXPECT_EQ(unrolled(lower(make_schedule("1f1b", {.ranks = 2, .micro_batches = 2})), 3),
            lower(make_schedule("1f1b", {.ranks = 2, .micro_batches = 2})));
}

TEST(ProgramOuroboros, TheVerifierSeesSeveralSteps) {
  const StepProgram program = late_program(3, 2);
  EXPECT_FALSE(refute(program).has_value());
  for (const LowerOptions& passes : {LowerOptions{.gathers = Gathers::kKept},
                                     {.gathers = Gathers::kPerMicroBatch, .recompute = true},
                                     {.recompute = true, .offload_activations = true, .offload_states = true}}) {
    const StepProgram other =
        lower(make_schedule("ouroboros", {.ranks = 3, .micro_batches = 2, .inexact = true}), passes);
    const auto refutation = refute(other);
    EXPECT_FALSE(refutation.has_value()) << refutation->what << to_text(other);
  }
  const auto refuted = [](StepProgram broken) {
    const auto refutation = refute(broken);
    return refutation ? refutation->what : "";
  };
  const auto without = [&](int rank, const std::string& action) {
    StepProgram broken = program;
    std::erase(broken.actions[static_cast<std::size_t>(rank)], parse_action(action));
    return broken;
  };
  EXPECT_NE(refuted(without(0, "0RECV_B1")).find("never received"), std::string::npos);
  EXPECT_NE(refuted(without(1, "1B1")).find("no backward"), std::string::npos);
  EXPECT_NE(refuted(without(1, "1F1")).find("never computes"), std::string::npos);
  StepProgram early = program;
  early.late = {1, 1, 0};  // the gradient that rank 1 sends in a step is there at the end of it
  EXPECT_NE(refuted(early).find("before the receive of what it needs"), std::string::npos);
  StepProgram exact = program;
  exact.inexact = false;
  EXPECT_NE(refuted(exact).find("how late"), std::string::npos);
  StepProgram few = program;
  few.late = {2, 1};
  EXPECT_NE(refuted(few).find("how late"), std::string::npos);
  StepProgram long_ago = program;
  long_ago.late = {1 << 24, 1, 0};
  EXPECT_NE(refuted(long_ago).find("too late"), std::string::npos);
  EXPECT_NE(error_of(ErrorCode::kUsage, [&] { (void)simulate(program); }).find("unrolled()"), std::string::npos);
  EXPECT_NE(error_of(ErrorCode::kUsage, [&] { verify(early); }).find("0B0"), std::string::npos);
  // Messages that cross a STEP cannot wait for ranks that meet there.
  const StepProgram crosses = parse_program(
      "zeroth-program 1 schedule=x ranks=2 micro_batches=1 chunks=0,1 inexact\n"
      "0: 0F0 0SEND_F0 STEP 0RECV_B0 0B0 STEP\n1: STEP 1RECV_F0 1F0 1B0 1SEND_B0 STEP\n");
  EXPECT_GT(simulate(crosses).step_time, 0);
  EXPECT_GT(simulate(crosses, {.steps_meet = true}).step_time, 0);
  const StepProgram waits = parse_program(
      "zeroth-program 1 schedule=x ranks=2 micro_batches=1 chunks=0,1 inexact\n"
      "0: 0F0 0SEND_F0 0RECV_B0 0B0 STEP STEP\n1: STEP 1RECV_F0 1F0 1B0 1SEND_B0 STEP\n");
  EXPECT_GT(simulate(waits).step_time, 0);
  EXPECT_NE(error_of(ErrorCode::kUsage, [&] { (void)simulate(waits, {.steps_meet = true}); }).find("meet"),
            std::string::npos);
}

TEST(ProgramOuroboros, AnExactProgramStepsOnce) {
  StepProgram program = unrolled(late_program(2, 1), 4);
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
