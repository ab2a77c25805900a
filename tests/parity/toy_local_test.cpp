// Local updates of sites that train apart: each method equals an exchange by hand between plain engines, to the bit,
// at every stage, and goes on from a checkpoint in the middle of a window.
#include "support/checkpoint_folder.h"
#include "support/error_of.h"
#include "support/thread_ranks.h"
#include "toy_by_hand.h"
#include "toy_engine.h"

#include <zeroth/base/error.h>
#include <zeroth/comm/received.h>
#include <zeroth/engine/local_updates.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Sites {
  int sites = 2;
  int ranks = 2;  ///< of a site
  ToyTraining training{};
  std::optional<LocalSettings> local{};  ///< unset: `hand` exchanges
  std::function<void(Engine&, Communicator across)> at_start{};
  std::function<void(Engine&, Communicator across, int site)> after_step{};
  ThreadTransport transport = ThreadTransport::kMemory;
  std::function<void(int site, ToyTraining&)> change{};  ///< of one site
};

struct SitesOutcome {
  std::vector<std::vector<std::vector<double>>> values{};  ///< of rank 0 of each site
  std::map<int, MemoryReport> memory{};                    ///< by rank of the job
  std::map<int, LocalReport> reports{};
  std::map<int, std::uint64_t> received{};  ///< from other sites, as counted
};

SitesOutcome train_sites(const Sites& job) {
  SitesOutcome outcome;
  outcome.values.resize(static_cast<std::size_t>(job.sites));
  std::mutex mutex;
  ThreadRanksOptions options;
  options.transport = job.transport;
  run_ranks(
      job.sites * job.ranks,
      [&](int rank, const std::shared_ptr<CommBackend>& backend) {
        const int site = rank / job.ranks;
        const auto table = std::make_shared<TrafficTable>();
        const auto across = std::make_shared<CountingBackend>(backend->split(rank % job.ranks, site, "sites"), table);
        std::unique_ptr<CommBackend> own = backend->split(site, rank, "site");
        ToyTraining training = job.training;
        training.world = job.ranks;
        training.data_of = [&](int one) { return site * job.ranks + one; };
        if (job.change) job.change(site, training);
        training.at_start = [&, before = training.at_start](Engine& engine, ToyModel& model) {
          if (job.local) {
            (void)LocalUpdates::attach(engine, across, *job.local);
            table->reset();
          }
          if (before) before(engine, model);
          if (job.at_start) job.at_start(engine, Communicator(across));
        };
        LocalReport report;
        std::uint64_t received = 0;
        training.after_step = [&, before = training.after_step](Engine& engine, ToyModel& model,
                                                                const StepResult& step) {
          if (before) before(engine, model, step);
          if (job.after_step) job.after_step(engine, Communicator(across), site);
          const std::vector<std::string> kinds = engine.state_kinds();
          if (step.step == training.steps && std::ranges::find(kinds, "outer_param") != kinds.end())
            engine.read_states({.kind = "outer_param"}, [](const StateTensor&) {});  // what is under way arrives
          if (const auto* local = dynamic_cast<const LocalUpdates*>(engine.follower())) report = local->report();
          received = table->row(CollectiveKind::kRecv).bytes + table->row(CollectiveKind::kSend).bytes;
        };
        const ToyOutcome got = train_toy_rank(training, std::move(own));
        const std::lock_guard lock(mutex);
        if (rank % job.ranks == 0) outcome.values[static_cast<std::size_t>(site)] = got.values;
        if (training.reports_memory) outcome.memory[rank] = got.memory.front();
        outcome.reports[rank] = report;
        outcome.received[rank] = received;
      },
      options);
  return outcome;
}

Sites sites_of(int stage, DType dtype = DType::kFloat32, int steps = 9) {
  Sites job;
  job.training.plan = zero_plan(stage, {"dp"});
  job.training.steps = steps;
  job.training.model.dtype = dtype;
  job.training.model.frozen_blocks = {1};
  job.training.reports_memory = false;
  job.training.model.round_gradients = dtype == DType::kBFloat16;
  return job;
}

template <class T>
SitesOutcome by_hand(Sites job, const LocalSettings& settings) {
  job.local.reset();
  std::mutex mutex;
  std::map<Engine*, std::unique_ptr<ByHand<T>>> hands;
  job.at_start = [&](Engine& engine, Communicator) {
    auto hand = std::make_unique<ByHand<T>>(engine, settings);
    const std::lock_guard lock(mutex);
    hands[&engine] = std::move(hand);
  };
  job.after_step = [&](Engine& engine, Communicator across, int) {
    ByHand<T>* hand = nullptr;
    {
      const std::lock_guard lock(mutex);
      hand = hands.at(&engine).get();
    }
    hand->after_step(across);
  };
  return train_sites(job);
}

SitesOutcome by_hand(const Sites& job, const LocalSettings& settings) {
  return job.training.model.dtype == DType::kFloat64 ? by_hand<double>(job, settings) : by_hand<float>(job, settings);
}

SitesOutcome trained(Sites job, const LocalSettings& settings) {
  job.local = settings;
  return train_sites(job);
}

const std::vector<std::pair<std::string, LocalSettings>>& methods() {
  static const std::vector<std::pair<std::string, LocalSettings>> all{
      {"local SGD", {.steps = 3}},
      {"DiLoCo", {.steps = 3, .outer_lr = 0.7, .outer_momentum = 0.9}},
      {"heavy ball", {.steps = 2, .outer_lr = 0.5, .outer_momentum = 0.5, .nesterov = false}},
      {"fragments", {.steps = 4, .outer_lr = 0.7, .outer_momentum = 0.9, .fragments = 3}},
      {"streaming",
       {.steps = 4, .outer_lr = 0.7, .outer_momentum = 0.9, .fragments = 2, .delay = 3, .keep_local = 0.5}},
      {"int8", {.steps = 3, .outer_lr = 0.7, .outer_momentum = 0.9, .payload = LocalPayload::kInt8, .block = 64}},
      {"int4",
       {.steps = 4,
        .outer_lr = 0.7,
        .outer_momentum = 0.9,
        .fragments = 2,
        .delay = 1,
        .payload = LocalPayload::kInt4}},
      {"fp4", {.steps = 3, .outer_lr = 0.7, .outer_momentum = 0.9, .payload = LocalPayload::kFp4}},
      {"CO2", {.method = LocalMethod::kCo2, .steps = 2}},
      {"CO2 with all",
       {.method = LocalMethod::kCo2,
        .steps = 2,
        .outer_lr = 0.8,
        .outer_momentum = 0.6,
        .nesterov = false,
        .gap_scale = 0.01,
        .clip = 0.02}},
      {"CO2 int8",
       {.method = LocalMethod::kCo2,
        .steps = 2,
        .outer_momentum = 0.6,
        .nesterov = false,
        .payload = LocalPayload::kInt8}},
  };
  return all;
}

void equal_an_exchange_by_hand(DType dtype, const std::vector<int>& stages) {
  for (const auto& [name, settings] : methods()) {
    const SitesOutcome expected = by_hand(sites_of(0, dtype), settings);
    for (const int stage : stages) {
      const SitesOutcome got = trained(sites_of(stage, dtype), settings);
      EXPECT_TRUE(got.values == expected.values) << name << ", " << name_of(dtype) << ", stage " << stage;
    }
  }
}

TEST(LocalUpdates, EqualAnExchangeByHand) {
  equal_an_exchange_by_hand(DType::kFloat32, {0, 3});
  equal_an_exchange_by_hand(DType::kBFloat16, {3});
}

TEST(LongLocalUpdates, EqualAnExchangeByHand) {
  equal_an_exchange_by_hand(DType::kFloat32, {1, 2});
  equal_an_exchange_by_hand(DType::kBFloat16, {0, 1, 2});
  equal_an_exchange_by_hand(DType::kFloat64, {0, 3});
}

TEST(LocalUpdates, PlainAveragingGivesAllSitesTheMean) {
  const SitesOutcome got = trained(sites_of(3), {.steps = 3});
  EXPECT_TRUE(got.values[0] == got.values[1]);
  Sites between = sites_of(3);
  between.training.steps = 8;
  const SitesOutcome apart = trained(between, {.steps = 3});
  EXPECT_FALSE(apart.values[0] == apart.values[1]) << "inside of a window sites have their own weights";
}

TEST(LongLocalUpdates, HaveTheSameBitsOverEveryTransportAndFromEveryStage) {
  for (const auto& [name, settings] : methods()) {
    const SitesOutcome expected = trained(sites_of(0), settings);
    Sites mixed = sites_of(0);
    mixed.change = [](int site, ToyTraining& training) { training.plan = zero_plan(3 * site, {"dp"}); };
    EXPECT_TRUE(trained(mixed, settings).values == expected.values) << name << ", stages 0 and 3";
    Sites messages = sites_of(3);
    messages.transport = ThreadTransport::kMessages;
    EXPECT_TRUE(trained(messages, settings).values == expected.values) << name << ", messages";
    Sites chaos = sites_of(3);
    chaos.training.mode = ExecutionMode::kChaos;
    EXPECT_TRUE(trained(chaos, settings).values == expected.values) << name << ", chaos";
  }
}

TEST(LongLocalUpdates, HaveTheSameBitsWithDegreesAndEarlyUpdates) {
  for (const auto& [name, settings] : methods()) {
    if (name != "streaming" && name != "CO2 int8" && name != "local SGD") continue;
    Sites job = sites_of(0, DType::kBFloat16, 6);
    job.ranks = 4;
    const SitesOutcome expected = trained(job, settings);
    for (const ShardingPlan& plan : {hsdp_plan(2, {"dp"}), hpz_plan(2, {"dp"}), zero_plan(3, {"dp"})}) {
      job.training.plan = plan;
      EXPECT_TRUE(trained(job, settings).values == expected.values) << name << ", " << plan.name;
    }
    Sites early = sites_of(3, DType::kBFloat16, 6);
    early.training.clipping = 0;
    const SitesOutcome late = trained(early, settings);
    early.training.tamper = [](int, ToyStructure&, EngineSettings& engine) { engine.update.inside_backward = true; };
    EXPECT_TRUE(trained(early, settings).values == late.values) << name << ", updates inside backward";
  }
}

// theta - lr g of each site, then the mean, against theta - lr mean(g): one rounding of the mean more. float64.
TEST(LocalUpdates, OfOneStepWithSgdAreDataParallelToRounding) {
  const auto plain = [](int, ToyStructure&, EngineSettings& settings) {
    settings.optimizer.momentum = false;
    for (GroupHyper& group : settings.groups) group.momentum = 0;
  };
  for (const int stage : {0, 3}) {
    Sites job = sites_of(stage, DType::kFloat64);
    job.training.optimizer = "SGD";
    job.training.clipping = 0;
    job.training.tamper = plain;
    const SitesOutcome got = trained(job, {.steps = 1});
    ToyTraining together = job.training;
    together.world = 4;
    const ToyOutcome expected = train_toy(together);
    for (std::size_t param = 0; param < expected.values.size(); ++param) {
      for (std::size_t i = 0; i < expected.values[param].size(); ++i)
        EXPECT_NEAR(got.values[0][param][i], expected.values[param][i],
                    1e-13 * (1 + std::abs(expected.values[param][i])));
    }
  }
}

void go_on_from_a_checkpoint(int saved, int from, int to) {
  for (const auto& [name, settings] : methods()) {
    const CheckpointFolder folder;
    const auto of_site = [&folder](int site) { return folder.text() + "/site" + std::to_string(site); };
    Sites whole = sites_of(from);
    whole.after_step = [&](Engine& engine, Communicator, int site) {
      if (engine.committed_steps() == saved) (void)engine.save(of_site(site));
    };
    const SitesOutcome expected = trained(whole, settings);
    Sites resumed = sites_of(to);
    resumed.training.model_seed = 99;
    resumed.training.first_step = saved;
    resumed.at_start = [&](Engine& engine, Communicator across) { (void)engine.load(of_site(across.rank())); };
    EXPECT_TRUE(trained(resumed, settings).values == expected.values) << name << " after step " << saved;
  }
}

TEST(LocalUpdates, GoOnFromACheckpointInTheMiddleOfAWindow) {
  go_on_from_a_checkpoint(5, 3, 0);
}

TEST(LongLocalUpdates, GoOnFromACheckpointOfAnyStep) {
  go_on_from_a_checkpoint(1, 3, 3);
  go_on_from_a_checkpoint(4, 0, 3);
  go_on_from_a_checkpoint(6, 3, 0);
  go_on_from_a_checkpoint(7, 3, 1);
}

TEST(LocalUpdates, ACheckpointOfPlainTrainingBeginsAWindow) {
  const CheckpointFolder folder;
  Sites first = sites_of(3);
  first.training.steps = 3;
  first.after_step = [&](Engine& engine, Communicator, int site) {
    if (engine.committed_steps() == 3) (void)engine.save(folder.text() + "/site" + std::to_string(site));
  };
  (void)trained(first, {.method = LocalMethod::kNone});
  const LocalSettings settings{.steps = 2, .outer_lr = 0.7, .outer_momentum = 0.9};
  Sites second = sites_of(0);
  second.training.first_step = 3;
  second.training.steps = 7;
  second.at_start = [&](Engine& engine, Communicator) {
    EXPECT_THAT(error_of(ErrorCode::kCheckpoint, [&] { (void)engine.load(folder.text() + "/site1"); }),
                AllOf(HasSubstr("missing"), HasSubstr("outer_param")));
    LoadOptions loose;
    loose.strict = false;
    (void)engine.load(folder.text() + "/site1", loose);
  };
  const SitesOutcome got = trained(second, settings);
  EXPECT_TRUE(got.values[0] == got.values[1]);
  // By hand from the same weights.
  second.at_start = {};
  Sites hand = second;
  hand.training.at_start = [&](Engine& engine, ToyModel&) { (void)engine.load(folder.text() + "/site1"); };
  EXPECT_TRUE(by_hand(hand, settings).values == got.values);
}

TEST(LocalUpdates, ASiteAloneLooksAhead) {
  Sites job = sites_of(3);
  job.sites = 1;
  const LocalSettings settings{.steps = 3, .outer_lr = 0.5};
  EXPECT_TRUE(trained(job, settings).values == by_hand(job, settings).values);
}

TEST(LocalUpdates, SitesBeginWithTheWeightsOfTheFirst) {
  Sites job = sites_of(0);
  job.change = [](int site, ToyTraining& training) { training.model_seed += static_cast<std::uint64_t>(site); };
  const LocalSettings settings{.steps = 3};
  for (const int stage : {0, 3}) {
    job.training.plan = zero_plan(stage, {"dp"});
    EXPECT_TRUE(trained(job, settings).values == trained(sites_of(0), settings).values) << "stage " << stage;
  }
}

void memory_and_bytes_are_as_planned(const std::vector<int>& stages) {
  for (const auto& [name, settings] : methods()) {
    for (const int stage : stages) {
      Sites job = sites_of(stage);
      job.training.reports_memory = true;
      const SitesOutcome got = trained(job, settings);
      const SitesOutcome without = trained(job, {.method = LocalMethod::kNone, .steps = 1});
      for (const auto& [rank, memory] : got.memory) {
        const std::string where = name + ", stage " + std::to_string(stage) + ", rank " + std::to_string(rank);
        EXPECT_EQ(memory.measured_peak, memory.planned) << where << "\n" << to_text(memory);
        const LocalReport& report = got.reports.at(rank);
        EXPECT_EQ(got.received.at(rank), report.received_bytes) << where;
        EXPECT_GT(report.exchanges, 0) << where;
        // The formula: elements of this rank's pieces of a fragment, times the bytes of an element.
        std::vector<std::uint64_t> bytes(static_cast<std::size_t>(settings.fragments), 0);
        std::uint64_t states = 0;
        const ToyStructure toy = make_toy(job.training.model, 7);
        const Degrees degrees = job.training.plan.degrees(job.ranks);
        const ModelLayout layout = make_model_layout(toy.params, toy.units, degrees);
        std::map<int, int> units;
        for (const FlatLayout& flat : layout.flats) {
          if (flat.trainable) units.emplace(flat.unit, static_cast<int>(units.size()));
        }
        for (const FlatLayout& flat : layout.flats) {
          if (!flat.trainable) continue;
          const auto elements = static_cast<std::uint64_t>(flat.shard(rank % job.ranks).size());
          const std::uint64_t codes = settings.payload == LocalPayload::kInt8 ? elements : (elements + 1) / 2;
          const auto padded = [](std::uint64_t exact) { return (exact + 63) / 64 * 64; };
          const auto block = static_cast<std::uint64_t>(settings.block);
          bytes[static_cast<std::size_t>(units.at(flat.unit) % settings.fragments)] +=
              settings.payload == LocalPayload::kFull ? padded(4 * elements)
                                                      : padded(codes) + padded((elements + block - 1) / block * 4);
          states += padded(4 * static_cast<std::uint64_t>(stage == 0 ? flat.length : flat.shard(rank % 2).size()));
        }
        EXPECT_EQ(report.bytes_per_exchange, bytes) << where;
        const bool late = settings.method == LocalMethod::kCo2 || settings.delay > 0;
        const std::uint64_t copies = (settings.outer_momentum > 0 ? 1U : 0U) +
                                     (settings.method == LocalMethod::kCo2 ? 1U : 0U) +
                                     (settings.outer_lr != 1 || settings.outer_momentum > 0 || late ? 1U : 0U);
        const auto optimizer = static_cast<std::size_t>(MemoryState::kOptimizer);
        EXPECT_EQ(memory.planned.bytes[optimizer] - without.memory.at(rank).planned.bytes[optimizer], copies * states)
            << where;
      }
    }
  }
}

TEST(LocalUpdates, MemoryAndBytesAreAsPlanned) {
  memory_and_bytes_are_as_planned({3});
}

TEST(LongLocalUpdates, MemoryAndBytesAreAsPlannedWithoutShards) {
  memory_and_bytes_are_as_planned({0});
}

TEST(LocalUpdates, BranchesExchangeNothing) {
  const LocalSettings settings{.method = LocalMethod::kNone, .steps = 1};
  for (const int stage : {0, 3}) {
    const SitesOutcome got = trained(sites_of(stage), settings);
    for (const auto& [rank, bytes] : got.received) EXPECT_EQ(bytes, 0U);
    for (int site = 0; site < 2; ++site) {
      ToyTraining alone = sites_of(stage).training;
      alone.world = 2;
      alone.data_of = [site](int rank) { return 2 * site + rank; };
      EXPECT_TRUE(train_toy(alone).values == got.values[static_cast<std::size_t>(site)]);
    }
  }
}

TEST(LocalUpdates, SitesHaveStepsOfTheirOwn) {
  // Site 1 has two micro-steps, and skips a step that has a NaN: site 0 neither votes with it nor counts it.
  Sites job = sites_of(3);
  const LocalSettings settings{.steps = 3};
  job.change = [](int site, ToyTraining& training) {
    if (site == 0) return;
    training.micro_steps = 2;
    training.steps = 10;
    training.poison = [](int, std::int64_t step, int, int param) { return step == 1 && param == 0; };
  };
  const SitesOutcome got = trained(job, settings);
  EXPECT_TRUE(got.values[0] == got.values[1]);
  EXPECT_TRUE(got.values == by_hand(job, settings).values);
}

TEST(LocalUpdates, RanksWithoutABatchTakePart) {
  for (const auto& [name, settings] : methods()) {
    if (name != "streaming" && name != "local SGD") continue;
    std::map<std::pair<int, int>, std::vector<std::vector<double>>> values;  // by stage and site
    for (const int stage : {0, 3}) {
      std::mutex mutex;
      run_ranks(4, [&](int rank, const std::shared_ptr<CommBackend>& backend) {
        const int site = rank / 2;
        const std::shared_ptr<CommBackend> across = backend->split(rank % 2, site, "sites");
        const std::shared_ptr<CommBackend> own = backend->split(site, rank, "site");
        const auto device = make_cpu_device(ExecutionMode::kInline, 0);
        ToyModel model({.width = 40, .blocks = 3}, 7);
        model.take_data_of(rank);
        EngineSettings options{.plan = zero_plan(stage, {"dp"}), .uneven = Uneven::kJoin};
        options.groups = {GroupHyper{.lr = 0.02}, GroupHyper{.lr = 0.05}};
        Engine engine(model.structure().params, model.structure().units, options, *device, own, model, Logger());
        model.attach(engine);
        (void)LocalUpdates::attach(engine, across, settings);
        const auto step = [&] { (void)engine.step(); };
        for (int batch = 0; engine.next_batch(batch < (rank % 2 == 0 ? 7 : 4), {.step = step}); ++batch) {
          (void)model.forward_backward(batch, 0);
          step();
        }
        std::vector<std::vector<double>> all;
        for (std::size_t param = 0; param < model.structure().params.size(); ++param)
          all.push_back(model.value(static_cast<int>(param)));
        engine.barrier();
        const std::lock_guard lock(mutex);
        values[{stage, site}] = std::move(all);
        EXPECT_EQ(engine.committed_steps(), 7);
      });
    }
    for (const int site : {0, 1}) EXPECT_TRUE((values[{0, site}]) == (values[{3, site}])) << name;
  }
}

TEST(LongLocalUpdates, HaveTheSameBitsWithStatesInFilesAndALossScale) {
  for (const auto& [name, settings] : methods()) {
    if (name != "streaming" && name != "CO2 with all" && name != "local SGD") continue;
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      Sites job = sites_of(3, dtype, 6);
      job.training.model.width = 70;
      job.training.model.round_gradients = true;
      job.training.tamper = [dtype](int, ToyStructure&, EngineSettings& engine) {
        if (dtype == DType::kFloat16) engine.loss_scaling = {.enabled = true, .initial_power = 4, .window = 1};
        engine.storage = {.folders = {std::filesystem::temp_directory_path().string()}, .stripe_bytes = 4096};
      };
      const SitesOutcome expected = trained(job, settings);
      job.training.plan.residency = {
          .optimizer = Residency::kFiles, .parameter = Residency::kFiles, .block_elements = 1024, .slots = 2};
      EXPECT_TRUE(trained(job, settings).values == expected.values) << name << ", " << name_of(dtype);
    }
  }
}

void expect_refused(const LocalSettings& settings, ErrorCode code, const std::string& text) {
  Sites job = sites_of(0);
  job.training.steps = 0;
  job.at_start = [&](Engine& engine, Communicator across) {
    EXPECT_THAT(error_of(code, [&] { (void)LocalUpdates::attach(engine, across.shared_backend(), settings); }),
                AllOf(HasSubstr(text), HasSubstr("engine.local_updates")));
  };
  (void)train_sites(job);
}

TEST(LocalUpdates, SettingsThatCannotBeAreRefusedByName) {
  expect_refused({.steps = 0}, ErrorCode::kConfig, "which: steps; expected: at least 1");
  expect_refused({.steps = 100, .fragments = 40}, ErrorCode::kConfig, "which: fragments; expected: 1 to ");
  expect_refused({.steps = 2, .fragments = 3}, ErrorCode::kConfig, "at most 2, the steps; got: 3");
  expect_refused({.steps = 4, .delay = 4}, ErrorCode::kConfig, "which: delay; expected: 0 to 3");
  expect_refused({.outer_lr = 0}, ErrorCode::kConfig, "which: outer_lr");
  expect_refused({.outer_momentum = 1}, ErrorCode::kConfig, "which: outer_momentum");
  expect_refused({.keep_local = 1}, ErrorCode::kConfig, "which: keep_local");
  expect_refused({.block = 48}, ErrorCode::kConfig, "which: block");
  expect_refused({.clip = 1}, ErrorCode::kConfig, "it is of method co2");
  expect_refused({.method = LocalMethod::kCo2, .steps = 4, .fragments = 2}, ErrorCode::kConfig, "one window late");
  expect_refused({.method = LocalMethod::kNone, .outer_lr = 0.5}, ErrorCode::kConfig, "which: outer_lr");
  EXPECT_THAT(error_of(ErrorCode::kConfig, [] { (void)local_method_of("gossip"); }),
              HasSubstr("expected: average, co2, none"));
  EXPECT_THAT(error_of(ErrorCode::kConfig, [] { (void)local_payload_of("fp8"); }), HasSubstr("full, int8, int4"));
}

TEST(LocalUpdates, TwiceIsAnError) {
  Sites job = sites_of(3);
  job.training.steps = 0;
  job.local = LocalSettings{.steps = 2};
  job.at_start = [](Engine& engine, Communicator across) {
    const LocalSettings settings{.steps = 2};
    EXPECT_THAT(
        error_of(ErrorCode::kUsage, [&] { (void)LocalUpdates::attach(engine, across.shared_backend(), settings); }),
        HasSubstr("has local updates already"));
  };
  (void)train_sites(job);
}

TEST(LocalUpdates, OtherSettingsOnAnotherRankAreAMismatchWithTheirNames) {
  for (const int odd : {1, 2, 3}) {
    Sites job = sites_of(3);
    job.training.steps = 0;
    job.at_start = [odd](Engine& engine, Communicator across) {
      LocalSettings settings{.steps = 4, .outer_lr = 0.7};
      if (across.rank() * 2 + engine.rank() == odd) settings = {.steps = 5, .outer_lr = 0.8};
      EXPECT_THAT(error_of(ErrorCode::kMismatch,
                           [&] { (void)LocalUpdates::attach(engine, across.shared_backend(), settings); }),
                  AllOf(HasSubstr("which: steps, outer_lr"),
                        HasSubstr("who: rank " + std::to_string(odd % 2) + " of site " + std::to_string(odd / 2))));
    };
    (void)train_sites(job);
  }
}

TEST(LocalUpdates, SitesWithOtherModelsAreAMismatch) {
  Sites job = sites_of(0);
  job.training.steps = 0;
  job.change = [](int site, ToyTraining& training) { training.model.width += site; };
  job.at_start = [](Engine& engine, Communicator across) {
    const LocalSettings settings{.steps = 2};
    EXPECT_THAT(
        error_of(ErrorCode::kMismatch, [&] { (void)LocalUpdates::attach(engine, across.shared_backend(), settings); }),
        AllOf(HasSubstr("sites train different models"), HasSubstr("of site 1")));
  };
  (void)train_sites(job);
}

TEST(LocalUpdates, ACheckpointOfOtherWindowsIsRefused) {
  const CheckpointFolder folder;
  const auto of_site = [&folder](int site) { return folder.text() + "/site" + std::to_string(site); };
  Sites first = sites_of(3);
  first.training.steps = 3;
  first.after_step = [&](Engine& engine, Communicator, int site) {
    if (engine.committed_steps() == 3) (void)engine.save(of_site(site));
  };
  (void)trained(first, {.steps = 2, .outer_lr = 0.7});
  Sites second = sites_of(3);
  second.training.first_step = 3;
  second.training.steps = 3;
  second.at_start = [&](Engine& engine, Communicator across) {
    EXPECT_THAT(error_of(ErrorCode::kCheckpoint, [&] { (void)engine.load(of_site(across.rank())); }),
                AllOf(HasSubstr("of other windows of local updates"), HasSubstr(": steps")));
    LoadOptions loose;
    loose.strict = false;
    (void)engine.load(of_site(across.rank()), loose);
    EXPECT_EQ(engine.committed_steps(), 3);
  };
  (void)trained(second, {.steps = 4, .outer_lr = 0.7});
}

}  // namespace
}  // namespace zeroth::test
