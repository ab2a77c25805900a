// Engines whose units have plans and groups of ranks of their own: the numbers are those of one process, or of one
// group.
#include "support/thread_ranks.h"
#include "toy_engine.h"
#include "toy_experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

struct Ranks {
  std::vector<ExpertsOutcome> outcomes = std::vector<ExpertsOutcome>(kExpertRanks);
  RankReport report{};
};

Ranks train_experts(const ExpertsTraining& training, ThreadTransport transport = ThreadTransport::kMemory) {
  Ranks ranks;
  const ThreadGroups groups(kExpertRanks, transport,
                            nodes_of_ranks(kExpertRanks, transport == ThreadTransport::kLevels ? 2 : 0));
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kExpertRanks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ranks.outcomes[static_cast<std::size_t>(rank)] =
            train_experts_rank(training, groups.group(rank, quick_options()));
      } catch (const Error& error) {
        const std::lock_guard lock(mutex);
        ranks.report.failures.push_back({.rank = rank, .text = error.what(), .code = error.code()});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

/// Of all ranks, "" where they have the numbers of one process.
std::string difference_from_one_process(const ExpertsOutcome& one_process, const Ranks& ranks) {
  if (!ranks.report.ok()) return ranks.report.text();
  for (std::size_t rank = 0; rank < ranks.outcomes.size(); ++rank) {
    const std::string text = difference(one_process, ranks.outcomes[rank]);
    if (!text.empty()) return "rank " + std::to_string(rank) + ": " + text;
  }
  return "";
}

std::vector<std::string> texts_of(const Ranks& ranks) {
  std::vector<std::string> texts;
  for (const RankFailure& failure : ranks.report.failures) texts.push_back(failure.text);
  return texts;
}

const ExpertsOutcome& one_process() {
  static const ExpertsOutcome outcome = train_experts_in_one_process({});
  return outcome;
}

TEST(Experts, TrainLikeOneProcessAtEveryStage) {
  for (int dense = 0; dense < 4; ++dense) {
    for (int experts = 0; experts < 4; ++experts) {
      ExpertsTraining training;
      training.dense = zero_plan(dense, {"edp", "ep"});
      training.experts = zero_plan(experts, {"edp"});
      const Ranks ranks = train_experts(training);
      EXPECT_EQ(difference_from_one_process(one_process(), ranks), "") << dense << " " << experts;
      for (const StepResult& result : ranks.outcomes[0].results) EXPECT_TRUE(result.committed);
    }
  }
}

TEST(Experts, TrainLikeOneProcessOverEveryTransport) {
  for (const ThreadTransport transport :
       {ThreadTransport::kMessages, ThreadTransport::kLevels, ThreadTransport::kMixed}) {
    for (const auto& [dense, experts] : {std::pair{3, 3}, {2, 3}, {3, 1}, {0, 2}}) {
      ExpertsTraining training;
      training.dense = zero_plan(dense, {"edp", "ep"});
      training.experts = zero_plan(experts, {"edp"});
      const Ranks ranks = train_experts(training, transport);
      // Over two levels sums are along the nodes: the same at every stage, though not those of rank order.
      ExpertsTraining plain = training;
      plain.dense = zero_plan(0, {"edp", "ep"});
      plain.experts = zero_plan(0, {"edp"});
      const ExpertsOutcome expected =
          transport == ThreadTransport::kLevels ? train_experts(plain, transport).outcomes[0] : one_process();
      if (transport != ThreadTransport::kLevels) {
        EXPECT_EQ(difference_from_one_process(expected, ranks), "") << dense << " " << experts;
      } else {
        ASSERT_TRUE(ranks.report.ok()) << ranks.report.text();
        EXPECT_EQ(difference(expected, ranks.outcomes[0]), "") << dense << " " << experts;
      }
    }
  }
}

// Each group has stores of its own, and one queue serves them all.
TEST(Experts, TrainLikeOneProcessWhereStatesOfGroupsRestInFiles) {
  constexpr Residency kMemory = Residency::kDevice;
  constexpr Residency kFiles = Residency::kFiles;
  const auto resting = [](Residency optimizer, Residency parameter) {
    return ResidencyPlan{.optimizer = optimizer, .parameter = parameter, .block_elements = 1024, .slots = 3};
  };
  const std::pair<ResidencyPlan, ResidencyPlan> kPlaces[] = {
      {resting(kFiles, kMemory), resting(kFiles, kMemory)},
      {resting(kFiles, kFiles), resting(kFiles, kFiles)},
      {resting(kMemory, kMemory), resting(kMemory, kFiles)},
      {resting(kMemory, kFiles), resting(kFiles, kMemory)},
  };
  for (const auto& [dense, experts] : {std::pair{3, 3}, {1, 2}, {0, 3}}) {
    for (const auto& [of_dense, of_experts] : kPlaces) {
      ExpertsTraining training;
      training.dense = zero_plan(dense, {"edp", "ep"});
      training.experts = zero_plan(experts, {"edp"});
      training.dense.residency = of_dense;
      training.experts.residency = of_experts;
      training.tamper = [](int, std::vector<ParamSpec>&, EngineSettings& settings) {
        settings.storage = {.folders = {std::filesystem::temp_directory_path().string()}, .stripe_bytes = 4096};
      };
      const Ranks ranks = train_experts(training);
      const std::string text = std::to_string(dense) + " " + std::to_string(experts);
      EXPECT_EQ(difference_from_one_process(one_process(), ranks), "") << text;
      for (const ExpertsOutcome& outcome : ranks.outcomes) {
        EXPECT_EQ(outcome.memory.planned, outcome.memory.measured_peak) << text << to_text(outcome.memory);
        EXPECT_EQ(outcome.memory.planned_files, outcome.memory.measured_files) << text;
        for (const TransferRow& row : outcome.transfers.rows) {
          ASSERT_TRUE(row.planned) << text;
          EXPECT_EQ(row.last_step.needed_bytes, row.planned->read_bytes) << text << to_text(outcome.transfers);
          EXPECT_EQ(row.last_step.changed_bytes, row.planned->write_bytes) << text << to_text(outcome.transfers);
        }
        EXPECT_FALSE(outcome.transfers.rows.empty()) << text;
      }
    }
  }
}

TEST(Experts, TrainLikeOneProcessWhereStreamsRunInAnyLegalOrder) {
  for (const std::uint64_t seed : {1U, 2U, 3U, 4U}) {
    ExpertsTraining training;
    training.dense = zero_plan(seed % 2 == 0 ? 3 : 2, {"edp", "ep"});
    training.experts = zero_plan(3, {"edp"});
    training.mode = ExecutionMode::kChaos;
    training.chaos_seed = seed;
    EXPECT_EQ(difference_from_one_process(one_process(), train_experts(training)), "") << seed;
  }
}

TEST(Experts, StagesAgreeWhileMicroStepsAccumulate) {
  ExpertsTraining plain;
  plain.micro_steps = 3;
  const Ranks expected = train_experts(plain);
  ASSERT_TRUE(expected.report.ok()) << expected.report.text();
  for (const auto& [dense, experts] : {std::pair{1, 2}, {3, 3}}) {
    ExpertsTraining training = plain;
    training.dense = zero_plan(dense, {"edp", "ep"});
    training.experts = zero_plan(experts, {"edp"});
    const Ranks ranks = train_experts(training);
    ASSERT_TRUE(ranks.report.ok()) << ranks.report.text();
    for (std::size_t rank = 0; rank < kExpertRanks; ++rank)
      EXPECT_EQ(difference(expected.outcomes[rank], ranks.outcomes[rank]), "") << dense << " " << experts;
  }
}

TEST(Experts, MemoryIsAsPlannedAndBytesAreThoseOfBothGroups) {
  for (const auto& [dense, experts] : {std::pair{0, 0}, {1, 3}, {3, 3}, {2, 1}}) {
    ExpertsTraining training;
    training.dense = zero_plan(dense, {"edp", "ep"});
    training.experts = zero_plan(experts, {"edp"});
    const Ranks ranks = train_experts(training);
    ASSERT_TRUE(ranks.report.ok()) << ranks.report.text();
    for (const ExpertsOutcome& rank : ranks.outcomes) {
      EXPECT_EQ(rank.memory.planned, rank.memory.measured_peak) << to_text(rank.memory);
      const WireBytes& wire = rank.planned_wire;
      EXPECT_EQ(wire.reduce_gradients, rank.reduce_bytes);
      EXPECT_EQ(wire.gather_parameters + wire.gather_gradients + wire.publish_parameters, rank.gather_bytes);
      EXPECT_GT(wire.total(), 0U);
    }
  }
}

TEST(Experts, ANonFiniteGradientOfOneExpertSkipsTheStepEverywhereWithItsName) {
  ExpertsTraining training;
  training.dense = zero_plan(3, {"edp", "ep"});
  training.experts = zero_plan(3, {"edp"});
  training.poison = [](int rank, std::int64_t step, int param) {
    return rank == 3 && step == 1 && param == kFirstExpert;
  };
  const Ranks ranks = train_experts(training);
  ASSERT_TRUE(ranks.report.ok()) << ranks.report.text();
  for (const ExpertsOutcome& rank : ranks.outcomes) {
    EXPECT_FALSE(rank.results[1].committed);
    ASSERT_TRUE(rank.results[1].first_offender.has_value());
    EXPECT_EQ(rank.results[1].first_offender->param, "experts.0.weight");
    EXPECT_EQ(rank.results[1].first_offender->rank, 3);
    EXPECT_TRUE(rank.results[2].committed);
  }
}

TEST(Experts, RanksOfOneGroupWithDifferentBoxesAreAMismatchOnAll) {
  ExpertsTraining training;
  training.tamper = [](int rank, std::vector<ParamSpec>& params, EngineSettings&) {
    if (rank == 2) params[static_cast<std::size_t>(kFirstExpert)].box_offset = {1, 0, 0};
  };
  const Ranks ranks = train_experts(training);
  ASSERT_EQ(ranks.report.failures.size(), 4U);
  EXPECT_THAT(texts_of(ranks), Each(AllOf(HasSubstr("ranks do not train the same thing"), HasSubstr("rank 2/4"),
                                          HasSubstr("experts.0.weight"), HasSubstr("at [1, 0, 0] of [2, 40, 40]"))));
}

TEST(Experts, RanksOfOneGroupThatTrainDifferentParametersAreAMismatchOnAll) {
  ExpertsTraining training;
  training.before_step = [](Engine& engine, std::int64_t step) {
    if (step == 0 && engine.rank() == 3) engine.expect_gradient(kFirstExpert, false);
  };
  const Ranks ranks = train_experts(training);
  ASSERT_EQ(ranks.report.failures.size(), 4U);
  EXPECT_THAT(texts_of(ranks), Each(AllOf(HasSubstr("ranks train different parameters"), HasSubstr("rank 3/4"))));
  int named = 0;
  for (const RankFailure& failure : ranks.report.failures) {
    const bool names = failure.text.find("experts.0.weight") != std::string::npos;
    EXPECT_EQ(names, failure.rank % 2 == 1) << failure.text;
    named += names ? 1 : 0;
  }
  EXPECT_EQ(named, 2);
}

std::string text_of_tampered(const std::function<void(std::vector<ParamSpec>&, EngineSettings&)>& tamper) {
  ExpertsTraining training;
  training.tamper = [&](int, std::vector<ParamSpec>& params, EngineSettings& settings) { tamper(params, settings); };
  const Ranks ranks = train_experts(training);
  EXPECT_EQ(ranks.report.failures.size(), 4U);
  return ranks.report.failures.empty() ? "no error" : ranks.report.failures.front().text;
}

TEST(Experts, SettingsThatCannotBeAreRefusedByName) {
  EXPECT_THAT(
      text_of_tampered([](auto&, EngineSettings& settings) { settings.shard_groups[1].distinct_axes.clear(); }),
      AllOf(HasSubstr("leaves out gradients of ranks that have batches of their own"), HasSubstr("experts, axis ep")));
  EXPECT_THAT(
      text_of_tampered([](auto&, EngineSettings& settings) { settings.shard_groups[0].distinct_axes = {"edp"}; }),
      AllOf(HasSubstr("sums gradients of different parameters"), HasSubstr("dense, axis edp")));
  EXPECT_THAT(text_of_tampered([](auto&, EngineSettings& settings) { settings.shard_groups[1].plan.axes = {"tp"}; }),
              AllOf(HasSubstr("the mesh has no such axis"), HasSubstr("edp, ep")));
  EXPECT_THAT(text_of_tampered([](auto&, EngineSettings& settings) { settings.shard_groups.pop_back(); }),
              AllOf(HasSubstr("a shard group that does not exist"), HasSubstr("experts.0")));
  EXPECT_THAT(text_of_tampered([](std::vector<ParamSpec>& params, EngineSettings&) {
                params[static_cast<std::size_t>(kFirstExpert)].box_offset = {2, 0, 0};
              }),
              AllOf(HasSubstr("a parameter is no box of its tensor"), HasSubstr("[1, 40, 40] at [2, 0, 0]")));
}

enum class Cut : std::uint8_t { kUnits, kInsideUnits };

/// Block after block, or parameter after parameter, in another group of the same ranks, with another plan.
void cut_in_two(const std::vector<ShardingPlan>& plans, ToyStructure& structure, EngineSettings& settings,
                Cut cut = Cut::kUnits) {
  settings.shard_groups = {{.name = "even", .plan = plans[0]}, {.name = "odd", .plan = plans[1]}};
  for (std::size_t unit = 0; unit < structure.units.size(); ++unit) {
    for (const int param : structure.units[unit].params) {
      structure.params[static_cast<std::size_t>(param)].shard_group =
          cut == Cut::kUnits ? static_cast<int>(unit % 2) : param % 2;
    }
  }
}

TEST(Groups, OfTheSameRanksWithDifferentStagesHaveTheNumbersOfOne) {
  for (const int world : {1, 3}) {
    ToyTraining plain = small(0, world);
    plain.model.reuse_last = true;
    const auto cut_by = [&plain](int even, int odd, Cut cut) {
      ToyTraining training = plain;
      const std::vector<ShardingPlan> plans{zero_plan(even, {"dp"}), zero_plan(odd, {"dp"})};
      training.tamper = [plans, cut](int, ToyStructure& structure, EngineSettings& settings) {
        cut_in_two(plans, structure, settings, cut);
      };
      return training;
    };
    // A cut inside of units is another layout: the norm's blocks are others, by the last bit.
    const std::map<Cut, ToyOutcome> expected{{Cut::kUnits, train_toy(plain)},
                                             {Cut::kInsideUnits, train_toy(cut_by(0, 0, Cut::kInsideUnits))}};
    EXPECT_NEAR(expected.at(Cut::kInsideUnits).results[0].grad_norm, expected.at(Cut::kUnits).results[0].grad_norm,
                1e-12 * expected.at(Cut::kUnits).results[0].grad_norm);
    for (const auto& [even, odd] : {std::pair{0, 3}, {3, 1}, {2, 3}, {3, 3}}) {
      for (const ThreadTransport transport : {ThreadTransport::kMemory, ThreadTransport::kMessages}) {
        for (const Cut cut : {Cut::kUnits, Cut::kInsideUnits}) {
          ToyTraining training = cut_by(even, odd, cut);
          training.transport = transport;
          const ToyOutcome outcome = train_toy(training);
          EXPECT_EQ(difference(expected.at(cut), outcome), "")
              << world << ": " << even << " " << odd << static_cast<int>(cut);
          for (const MemoryReport& memory : outcome.memory) EXPECT_EQ(memory.planned, memory.measured_peak);
        }
      }
    }
  }
}

TEST(Groups, RanksOnAnyPathsReduceBothGroups) {
  ToyTraining plain = small(0, 3);
  plain.skip = random_paths(5);
  for (const ExecutionMode mode : {ExecutionMode::kInline, ExecutionMode::kChaos}) {
    for (const Cut cut : {Cut::kUnits, Cut::kInsideUnits}) {
      ToyTraining training = plain;
      training.mode = mode;
      training.tamper = [cut](int, ToyStructure& structure, EngineSettings& settings) {
        cut_in_two({zero_plan(2, {"dp"}), zero_plan(3, {"dp"})}, structure, settings, cut);
      };
      ToyTraining whole = training;
      whole.mode = ExecutionMode::kInline;
      whole.tamper = [cut](int, ToyStructure& structure, EngineSettings& settings) {
        cut_in_two({zero_plan(0, {"dp"}), zero_plan(0, {"dp"})}, structure, settings, cut);
      };
      EXPECT_EQ(difference(train_toy(whole), train_toy(training)), "");
    }
  }
}

/// Ranks with copies of the whole model that compute on one batch: as tensor-parallel ranks do with what they do not
/// split.
TEST(Groups, CopiesOnOneBatchCountOnce) {
  for (const int stage : {0, 3}) {
    const ToyOutcome expected = train_toy(small(stage, 2));
    ToyTraining training = small(stage, 4);
    training.data_of = [](int rank) { return rank / 2; };
    training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
      settings.mesh = {{{"dp", 2}, {"tp", 2}}};
      settings.batch_axes = {"dp"};
    };
    const ToyOutcome outcome = train_toy(training);
    EXPECT_EQ(difference(expected, outcome), "");
    EXPECT_EQ(outcome.results[0].batches, 2);
  }
}

TEST(Groups, CopiesStartFromTheValuesOfOneRank) {
  const ToyOutcome expected = train_toy(small(3, 2));
  std::vector<ToyOutcome> outcomes(4);
  run_ranks(4, [&](int rank, const std::shared_ptr<CommBackend>& backend) {
    ToyTraining training = small(3, 4);
    training.model_seed += static_cast<std::uint64_t>(rank);
    training.data_of = [](int who) { return who / 2; };
    training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
      settings.mesh = {{{"dp", 2}, {"tp", 2}}};
      settings.batch_axes = {"dp"};
    };
    outcomes[static_cast<std::size_t>(rank)] = train_toy_rank(training, backend->split(0, rank, "ranks"));
  });
  for (const ToyOutcome& outcome : outcomes) EXPECT_EQ(difference(expected, outcome), "");
}

/// Ranks of a pipeline: other units on each stage, one norm, one decision.
TEST(Groups, StagesWithOtherUnitsShareOneNorm) {
  const auto options_of = [](int stage) {
    ToyOptions options{.width = 40, .blocks = 3 + 2 * stage};
    return options;
  };
  std::vector<ToyOutcome> alone;
  for (const int stage : {0, 1}) {
    ToyTraining training = small(3, 2);
    training.model = options_of(stage);
    training.clipping = 0;
    alone.push_back(train_toy(training));
  }
  std::vector<ToyOutcome> together(4);
  run_ranks(4, [&](int rank, const std::shared_ptr<CommBackend>& backend) {
    ToyTraining training = small(3, 4);
    training.model = options_of(rank / 2);
    training.clipping = 0;
    training.data_of = [](int who) { return who % 2; };
    training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
      settings.mesh = {{{"pp", 2}, {"dp", 2}}};
      settings.batch_axes = {"dp"};
      settings.shard_groups = {{.name = "stage", .plan = settings.plan, .distinct_axes = {"pp"}}};
    };
    together[static_cast<std::size_t>(rank)] = train_toy_rank(training, backend->split(0, rank, "ranks"));
  });
  for (std::size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(together[rank].values, alone[rank / 2].values) << rank;
    EXPECT_EQ(together[rank].norms, together[0].norms);
    for (std::size_t step = 0; step < together[rank].results.size(); ++step) {
      const double first = alone[0].results[step].grad_norm;
      const double second = alone[1].results[step].grad_norm;
      EXPECT_NEAR(together[rank].results[step].grad_norm, std::sqrt(first * first + second * second), 1e-12);
    }
  }
}

}  // namespace
}  // namespace zeroth::test
