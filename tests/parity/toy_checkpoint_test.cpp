// Checkpoints of the toy engine: what is resumed is what was saved, on any number of ranks and at any stage; what is
// not whole is never loaded.
#include "support/checkpoint_folder.h"
#include "support/error_of.h"
#include "support/thread_ranks.h"
#include "toy_engine.h"

#include <zeroth/checkpoint/folder.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Folder = CheckpointFolder;

ToyTraining training_of(int zero_stage, int world, DType dtype = DType::kFloat32) {
  ToyTraining training = small(zero_stage, world);
  training.model.dtype = dtype;
  training.model.frozen_blocks = {1};
  training.model.tie_first_two = true;
  training.model.round_gradients = size_of(dtype) == 2;
  if (dtype == DType::kFloat16) {
    training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
      settings.loss_scaling = {.enabled = true, .initial_power = 4, .window = 1};
    };
  }
  training.reports_memory = false;
  return training;
}

/// Six steps, and a save after the third.
ToyOutcome save_after_three(ToyTraining training, const std::string& folder, SaveOptions options = {}) {
  training.after_step = [folder, options](Engine& engine, ToyModel&, const StepResult& result) {
    if (result.step == 3) (void)engine.save(folder, options);
  };
  return train_toy(training);
}

/// The last three steps of it, from the checkpoint.
ToyOutcome resume_from(ToyTraining training, const std::string& path) {
  training.first_step = 3;
  training.model_seed = 99;  // other values, which must all be replaced
  training.at_start = [path](Engine& engine, ToyModel&) {
    const LoadReport report = engine.load(path);
    require(report.manifest.step == 3 && engine.committed_steps() == 3, "the step that was loaded");
    const bool adapts = engine.settings().loss_scaling.is_dynamic();
    require(!adapts || engine.loss_scale() == 64,
            "the loss scale that was saved: it grew in the second and third step");
  };
  return train_toy(training);
}

std::string difference_of_ends(const ToyOutcome& whole, const ToyOutcome& resumed) {
  ToyOutcome end = whole;
  end.losses.erase(end.losses.begin(), end.losses.begin() + 3);
  end.norms.erase(end.norms.begin(), end.norms.begin() + 3);
  return difference(end, resumed);
}

class CheckpointResume : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, CheckpointResume,
                         ::testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(CheckpointResume, HasTheBitsOfTheRunThatWentOnAtEveryStage) {
  for (const int world : {1, 3}) {
    for (const int stage : {0, 1, 2, 3}) {
      const Folder folder;
      const ToyTraining training = training_of(stage, world, GetParam());
      const ToyOutcome whole = save_after_three(training, folder.text());
      for (const int other : {0, 3}) {
        ToyTraining resumed = training;
        resumed.plan = zero_plan(other, {"dp"});
        EXPECT_EQ(difference_of_ends(whole, resume_from(resumed, folder.text())), "")
            << world << " ranks, stage " << stage << " -> " << other;
      }
    }
  }
}

/// Values of all parameters when a checkpoint has been loaded.
std::vector<std::vector<double>> values_after_load(ToyTraining training, const std::string& path) {
  training.first_step = training.steps = 3;
  training.model_seed = 99;
  training.at_start = [path](Engine& engine, ToyModel&) { (void)engine.load(path); };
  return train_toy(training).values;
}

TEST_P(CheckpointResume, AnyWorldReadsAnyCheckpoint) {
  for (const int from : {1, 2, 4}) {
    const Folder folder;
    ToyTraining training = training_of(from % 4, from, GetParam());
    training.steps = 3;
    training.optimizer = from == 2 ? "SGD" : "AdamW";
    const ToyOutcome saved = save_after_three(training, folder.text());
    for (const int to : {1, 2, 3, 4}) {
      ToyTraining other = training;
      other.world = to;
      other.plan = zero_plan((from + to) % 4, {"dp"});
      EXPECT_EQ(values_after_load(other, folder.text()), saved.values) << from << " -> " << to;
      // And what it saves itself is the same again.
      const Folder again;
      other.first_step = 3;
      other.model_seed = 99;
      other.at_start = [&](Engine& engine, ToyModel&) {
        (void)engine.load(folder.text());
        (void)engine.save(again.text());
      };
      (void)train_toy(other);
      EXPECT_EQ(values_after_load(training, again.text()), saved.values) << from << " -> " << to << " and back";
    }
  }
}

TEST(Checkpoint, HyperParametersAndCountsComeBack) {
  const Folder folder;
  ToyTraining training = training_of(2, 2);
  training.after_step = [&](Engine& engine, ToyModel&, const StepResult& result) {
    if (result.step != 3) return;
    GroupHyper hyper = engine.settings().groups[0];
    hyper.lr = 0.1 / 3;
    engine.set_group(0, hyper);
    (void)engine.save(folder.text());
  };
  const ToyOutcome whole = train_toy(training);
  EXPECT_EQ(difference_of_ends(whole, resume_from(training_of(3, 2), folder.text())), "");
}

TEST(Checkpoint, WhatTheCallerGivesComesBack) {
  const Folder folder;
  const std::vector<float> buffer{1, 2, 3, 4, 5, 6};
  ToyTraining training = training_of(1, 2);
  training.after_step = [&](Engine& engine, ToyModel&, const StepResult& result) {
    if (result.step != 3) return;
    (void)engine.save(folder.text(), {.user = "{\"epoch\": 7}",
                                      .user_of_rank = std::to_string(engine.rank()),
                                      .extras = {{.about = {.name = "running_mean", .dtype = "F32", .shape = {2, 3}},
                                                  .data = std::as_bytes(std::span(buffer))}}});
  };
  (void)train_toy(training);
  for (const int world : {2, 3}) {
    ToyTraining other = training_of(0, world);
    other.first_step = 3;
    other.at_start = [&](Engine& engine, ToyModel&) {
      const LoadReport report = engine.load(folder.text());
      require(report.user == "{\"epoch\": 7}", "the caller's JSON");
      require(report.user_of_rank == (world == 2 ? std::to_string(engine.rank()) : ""), "the rank's JSON");
      require(report.extras.size() == 1 && report.extras[0].about.name == "running_mean", "the tensor's name");
      require(std::ranges::equal(report.extras[0].data, std::as_bytes(std::span(buffer))), "the tensor");
    };
    (void)train_toy(other);
  }
}

TEST(Checkpoint, FilesAreAsLargeAsTheStatesAndBalancedToABlock) {
  const Folder folder;
  ToyTraining training = training_of(0, 4);  // every rank has everything, and writes its part
  (void)save_after_three(training, folder.text());
  const Manifest manifest = read_manifest(folder.step(3));
  std::uint64_t states = 0;
  for (const CheckpointParam& param : manifest.params) {
    for (const CheckpointState& state : param.states) {
      std::uint64_t elements = 1;
      for (const std::int64_t extent : state.shape) elements *= static_cast<std::uint64_t>(extent);
      states += elements * (state.dtype == "F32" ? 4 : 0);
    }
  }
  std::uint64_t files = 0;
  std::uint64_t most = 0;
  for (const CheckpointFile& file : manifest.files) {
    files += file.bytes;
    most = std::max(most, file.bytes);
  }
  const std::uint64_t headers = manifest.files.size() * 16'384;
  EXPECT_GE(files, states);
  EXPECT_LE(files, states + headers);
  // Blocks of 1,024 elements, in each of some ten flats, with three states each.
  EXPECT_LE(most, states / 4 + 16'384 + 10 * 3 * 4'096);
}

// --- what is not whole
// ------------------------------------------------------------------------------------------------

std::string load_error(const ToyTraining& like, const std::string& path) {
  ToyTraining training = like;
  training.first_step = 3;
  training.at_start = [path](Engine& engine, ToyModel& model) {
    std::vector<std::vector<double>> before;
    for (int param = 0; param < static_cast<int>(model.structure().params.size()); ++param)
      before.push_back(model.value(param));
    try {
      (void)engine.load(path);
    } catch (const Error& error) {
      for (int param = 0; param < static_cast<int>(model.structure().params.size()); ++param)
        require(before[static_cast<std::size_t>(param)] == model.value(param), "a failed load has changed a value");
      require(error.code() == ErrorCode::kCheckpoint || error.code() == ErrorCode::kIo, error.what());
      throw;
    }
  };
  return message_of(training);
}

TEST(Checkpoint, EveryByteOfEveryFileCounts) {
  const Folder folder;
  ToyTraining training = training_of(3, 2);
  training.model.blocks = 2;
  training.model.width = 12;
  training.model.frozen_blocks.clear();
  training.model.tie_first_two = false;
  (void)save_after_three(training, folder.text());
  std::mt19937 random(3);
  for (const char* const name : {"rank-00000.safetensors", "rank-00001.safetensors", "manifest.json"}) {
    const std::string file = folder.step(3) + "/" + name;
    const auto size = fs::file_size(file);
    for (int trial = 0; trial < 12; ++trial) {
      const auto at = static_cast<std::streamoff>(random() % size);
      std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekg(at);
      const int old = stream.get();
      const char flipped = static_cast<char>(old ^ (1 << (random() % 8)));
      stream.seekp(at);
      stream.put(flipped);
      stream.flush();
      const std::string text = load_error(training, folder.step(3));
      EXPECT_THAT(text, HasSubstr("[CHECKPOINT]")) << name << " byte " << at;
      EXPECT_THAT(text, HasSubstr(name)) << name << " byte " << at;
      stream.seekp(at);
      stream.put(static_cast<char>(old));
    }
  }
  EXPECT_EQ(values_after_load(training, folder.step(3)).size(), 7U);  // whole again
}

TEST(Checkpoint, TornOnesAreSkippedWithTheReasonAndTheNewestWholeOneIsLoaded) {
  const Folder folder;
  ToyTraining training = training_of(1, 2);
  training.after_step = [&](Engine& engine, ToyModel&, const StepResult&) { (void)engine.save(folder.text()); };
  (void)train_toy(training);
  fs::resize_file(folder.step(6) + "/manifest.json", 100);
  fs::remove(folder.step(5) + "/manifest.json");
  ToyTraining other = training_of(2, 1);
  other.first_step = 4;
  other.at_start = [&](Engine& engine, ToyModel&) {
    const LoadReport report = engine.load(folder.text());
    require(report.manifest.step == 4, "the newest whole one");
    require(report.skipped.size() == 2, "two are skipped");
    require(report.skipped[0].find("a manifest is torn") != std::string::npos, report.skipped[0]);
  };
  (void)train_toy(other);
  // One whose files are torn is none either. By its own name it is refused.
  fs::resize_file(folder.step(4) + "/rank-00001.safetensors", 1000);
  ToyTraining older = training_of(2, 2);
  older.first_step = 3;
  older.at_start = [&](Engine& engine, ToyModel&) {
    const LoadReport report = engine.load(folder.text());
    require(report.manifest.step == 3, "the newest whole one");
    require(report.skipped.size() == 3 && report.skipped[2].find("rank-00001.safetensors") != std::string::npos,
            report.skipped.back());
  };
  (void)train_toy(older);
  EXPECT_THAT(load_error(training_of(2, 2), folder.step(4)),
              AllOf(HasSubstr("a file of the checkpoint is torn"), HasSubstr("rank-00001.safetensors")));
}

TEST(Checkpoint, AnotherModelIsRefusedWithNames) {
  const Folder folder;
  (void)save_after_three(training_of(2, 2), folder.text());
  ToyTraining wider = training_of(2, 2);
  wider.model.width = 41;
  EXPECT_THAT(
      load_error(wider, folder.text()),
      AllOf(HasSubstr("other shapes or dtypes"), HasSubstr("in.weight/weight: F32 [40, 5] there, F32 [41, 5] here")));
  ToyTraining deeper = training_of(2, 2);
  deeper.model.blocks = 6;
  EXPECT_THAT(load_error(deeper, folder.text()),
              AllOf(HasSubstr("of another model or optimizer"),
                    HasSubstr("missing blocks.5.weight/weight, blocks.5.bias/weight")));
  ToyTraining shorter = training_of(2, 2);
  shorter.model.blocks = 4;
  EXPECT_THAT(load_error(shorter, folder.text()), HasSubstr("beyond the model blocks.4.weight"));
  ToyTraining sgd = training_of(2, 2);
  sgd.optimizer = "SGD";
  EXPECT_THAT(load_error(sgd, folder.text()),
              AllOf(HasSubstr("of another optimizer"), HasSubstr("expected: SGD; got: AdamW")));
  // What is missing keeps its values, if that is asked for.
  deeper.first_step = 3;
  deeper.at_start = [&](Engine& engine, ToyModel&) {
    const LoadReport report = engine.load(folder.text(), {.strict = false});
    require(!report.missing.empty() && report.unexpected.empty(), "what was missing");
  };
  (void)train_toy(deeper);
}

TEST(Checkpoint, BetweenABackwardAndItsStepIsRefused) {
  const Folder folder;
  ToyTraining training = training_of(1, 2);
  training.micro_steps = 2;
  training.steps = 1;
  training.at_start = [&](Engine& engine, ToyModel& model) {
    (void)model.forward_backward(0, 0);
    const std::string text = error_of(ErrorCode::kUsage, [&] { (void)engine.save(folder.text()); });
    require(text.find("between a backward and its step()") != std::string::npos, text);
    engine.discard_gradients();
  };
  (void)train_toy(training);
}

TEST(Checkpoint, AStepHasOneStateAndRetentionKeepsTheNewest) {
  const Folder folder;
  ToyTraining training = training_of(3, 2);
  training.after_step = [&](Engine& engine, ToyModel&, const StepResult&) {
    const std::string path = engine.save(folder.text(), {.retention = {.keep_last = 2, .keep_every = 3}});
    require(engine.save(folder.text()) == path, "the same state again");
    const std::string text =
        error_of(ErrorCode::kUsage, [&] { (void)engine.save(folder.text(), {.user = "\"other\""}); });
    require(text.find("has been saved there before") != std::string::npos, text);
    require(text.find("got: another client_state") != std::string::npos, text);
    require(engine.save(folder.text(), {.user = "\"other\"", .overwrite = true}) == path, "another state");
    require(read_manifest(path).user == "\"other\"", "the other state");
    require(engine.load(folder.text(), {.hypers = false}).path == path, "it is the newest");
  };
  (void)train_toy(training);
  EXPECT_THAT(folder.names(), ElementsAre("LATEST", "step-00000003", "step-00000005", "step-00000006"));
}

TEST(Checkpoint, NothingElseInTheFolderIsTouched) {
  const Folder folder;
  fs::create_directories(folder.text() + "/step-00000001.tmp-old");
  fs::create_directories(folder.text() + "/step-00000002.tmp-foreign");
  fs::create_directories(folder.text() + "/step-7");
  const auto touch = [&](const std::string& name) { std::ofstream(folder.text() + "/" + name) << "x"; };
  touch("step-00000001.tmp-old/lock");
  touch("step-00000001.tmp-old/rank-00000.safetensors");
  touch("step-00000002.tmp-foreign/lock");
  touch("step-00000002.tmp-foreign/notes.txt");  // not ours
  touch("notes.txt");
  (void)save_after_three(training_of(1, 2), folder.text(), {.retention = {.keep_last = 1}});
  EXPECT_THAT(folder.names(),
              ElementsAre("LATEST", "notes.txt", "step-00000002.tmp-foreign", "step-00000003", "step-7"));
}

TEST(Checkpoint, AFailureOfOneRankIsThatOfAllAndLeavesNothing) {
  const Folder folder;
  ToyTraining training = training_of(2, 3);
  training.after_step = [&](Engine& engine, ToyModel&, const StepResult& result) {
    if (result.step == 1) (void)engine.save(folder.text());
    if (result.step != 2) return;
    // Rank 1 finds its file's name taken.
    const std::string text = error_of(ErrorCode::kIo, [&] {
      SaveOptions options;
      std::vector<std::byte> wrong(3);
      (void)engine.save("/proc/no/such/folder", options);
    });
    require(text.find("a checkpoint could not be begun") != std::string::npos, text);
    require(text.find("/proc/no/such/folder") != std::string::npos, text);
  };
  (void)train_toy(training);
  EXPECT_THAT(folder.names(), ElementsAre("LATEST", "step-00000001"));
}

/// Saves after steps 1, 2 and 3, with frozen weights in the first one alone.
ToyOutcome save_thrice(ToyTraining training, const std::string& folder, int keep_last) {
  training.after_step = [folder, keep_last](Engine& engine, ToyModel&, const StepResult& result) {
    if (result.step <= 3) (void)engine.save(folder, {.retention = {.keep_last = keep_last}, .frozen = Frozen::kOnce});
  };
  return train_toy(training);
}

TEST(CheckpointBases, FrozenWeightsAreWrittenOnceAndStayWhileSomethingRefersToThem) {
  const Folder folder;
  ToyTraining training = training_of(3, 2);
  training.model.frozen_blocks = {0, 1, 2};
  const ToyOutcome whole = save_thrice(training, folder.text(), /*keep_last=*/1);
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"LATEST", "step-00000001", "step-00000003"}));
  const Manifest first = read_manifest(folder.step(1));
  const Manifest last = read_manifest(folder.step(3));
  EXPECT_EQ(last.base, (CheckpointBase{.name = "step-00000001", .run = first.run}));
  EXPECT_LT(last.files[0].bytes * 5, first.files[0].bytes * 4);
  ToyTraining elsewhere = training;
  elsewhere.world = 3;
  elsewhere.plan = zero_plan(1, {"dp"});
  EXPECT_EQ(difference_of_ends(whole, resume_from(training, folder.text())), "");
  EXPECT_EQ(values_after_load(elsewhere, folder.text()), values_after_load(training, folder.step(3)));

  // A run that goes on refers to the same one.
  training.first_step = 3;
  training.steps = 5;
  training.at_start = [&folder](Engine& engine, ToyModel&) { (void)engine.load(folder.text()); };
  training.after_step = [&folder](Engine& engine, ToyModel&, const StepResult&) {
    (void)engine.save(folder.text(), {.retention = {.keep_last = 1}, .frozen = Frozen::kOnce});
  };
  (void)train_toy(training);
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"LATEST", "step-00000001", "step-00000005"}));
  EXPECT_EQ(read_manifest(folder.step(5)).base.name, "step-00000001");

  // Without it, or with another one in its place, nothing is loaded.
  ToyTraining again = training_of(3, 2);
  again.model.frozen_blocks = {0, 1, 2};
  fs::rename(folder.step(1), folder.step(1) + "-aside");
  EXPECT_THAT(error_of(ErrorCode::kCheckpoint, [&] { (void)resume_from(again, folder.step(5)); }),
              HasSubstr("step-00000001"));
  fs::copy(folder.step(5), folder.step(1), fs::copy_options::recursive);
  EXPECT_THAT(error_of(ErrorCode::kCheckpoint, [&] { (void)resume_from(again, folder.step(5)); }),
              HasSubstr("is another one"));
}

TEST(CheckpointNames, ParametersMayHaveOtherNamesInTheCheckpoint) {
  const Folder folder;
  ToyTraining training = training_of(2, 2);
  training.steps = 3;
  const ToyOutcome saved = save_after_three(training, folder.text());
  training.first_step = 3;
  training.model_seed = 99;
  const auto renamed = [](int, ToyStructure& structure, EngineSettings&) {
    for (ParamSpec& spec : structure.params) spec.name = "module." + spec.name;
  };
  training.tamper = renamed;
  training.at_start = [&folder](Engine& engine, ToyModel&) {
    LoadOptions options;
    for (const ParamSpec& spec : engine.layout().params) options.names[spec.name] = spec.name.substr(7);
    const LoadReport report = engine.load(folder.text(), options);
    require(report.missing.empty() && report.unexpected.empty(), "every parameter by its name there");
  };
  EXPECT_EQ(train_toy(training).values, saved.values);
  training.at_start = [&folder](Engine& engine, ToyModel&) { (void)engine.load(folder.text()); };
  EXPECT_THAT(error_of(ErrorCode::kCheckpoint, [&] { (void)train_toy(training); }), HasSubstr("missing module."));
}

struct MidStep {
  ReductionPolicy policy = ReductionPolicy::kPerMicroStep;
  int gradient_degree = 0;
  ThreadTransport transport = ThreadTransport::kMemory;
};

/// Four ranks, three micro-steps; some blocks are skipped, and some get gradients of several backwards.
ToyTraining in_micro_steps(const MidStep& row, int stage, DType dtype) {
  ToyTraining training = training_of(stage, 4, dtype);
  training.micro_steps = 3;
  training.passes = 2;
  training.transport = row.transport;
  training.plan.policy = row.policy;
  training.plan.gradient_degree = row.gradient_degree;
  if (row.transport == ThreadTransport::kMemory) {
    training.skip = [](int rank, std::int64_t pass, int block) { return (rank + block + pass) % 4 == 0; };
  }
  return training;
}

TEST(CheckpointInsideAStep, GoesOnWithTheSameBitsAtEveryStage) {
  const MidStep rows[] = {{},
                          {.policy = ReductionPolicy::kPerStep},
                          {.gradient_degree = 2},
                          {.transport = ThreadTransport::kMessages},
                          {.policy = ReductionPolicy::kPerStep, .transport = ThreadTransport::kMessages},
                          {.gradient_degree = 2, .transport = ThreadTransport::kMessages}};
  int number = 0;
  for (const MidStep& row : rows) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      const int stage = number++ % 4;
      const int ended = 1 + number % 2;
      const Folder folder;
      ToyTraining training = in_micro_steps(row, stage, dtype);
      training.after_micro_step = [&folder, ended](Engine& engine, int step, int now) {
        if (step != 3) return;
        if (now == 1) (void)engine.save(folder.text());
        if (now == ended && ended > 1) (void)engine.save(folder.text());
      };
      training.after_step = [&folder](Engine& engine, ToyModel&, const StepResult& result) {
        if (result.step == 3) (void)engine.save(folder.text(), {.retention = {.keep_last = 2}});
      };
      const ToyOutcome whole = train_toy(training);
      EXPECT_THAT(folder.names(), ::testing::Contains("step-00000003-" + std::to_string(ended)));
      for (const int other : {stage, (stage + 3) % 4}) {
        ToyTraining resumed = in_micro_steps(row, other, dtype);
        resumed.first_step = 3;
        resumed.first_micro_step = ended;
        resumed.model_seed = 99;
        resumed.at_start = [&folder, ended](Engine& engine, ToyModel&) {
          const LoadReport report = engine.load(folder.text());
          require(report.manifest.step == 3 && engine.micro_step() == ended, "the micro-step that was loaded");
        };
        const ToyOutcome rest = train_toy(resumed);
        const std::string where = "row " + std::to_string(&row - rows) + ", " + std::string(name_of(dtype)) +
                                  ", stage " + std::to_string(stage) + " -> " + std::to_string(other);
        EXPECT_EQ(std::vector(whole.norms.begin() + 3, whole.norms.end()), rest.norms) << where;
        EXPECT_EQ(whole.values, rest.values) << where;
      }
    }
  }
}

TEST(CheckpointInsideAStep, OtherRanksAndOtherAccumulationsAreRefusedOrForgetIt) {
  const Folder folder;
  ToyTraining training = in_micro_steps({}, 2, DType::kFloat32);
  training.skip = nullptr;
  training.steps = 1;
  training.after_micro_step = [&folder](Engine& engine, int, int now) {
    if (now == 1) (void)engine.save(folder.text());
  };
  (void)train_toy(training);
  training.after_micro_step = nullptr;
  training.steps = 0;
  std::vector<std::string> missing;
  bool strict = true;
  training.at_start = [&](Engine& engine, ToyModel&) {
    const LoadReport report = engine.load(folder.text(), {.strict = strict});
    require(engine.micro_step() == 0, "the step begins anew");
    if (engine.rank() == 0) missing = report.missing;
  };
  const auto changes = std::to_array<std::function<void(ToyTraining&)>>(
      {[](ToyTraining& other) { other.world = 2; }, [](ToyTraining& other) { other.micro_steps = 4; },
       [](ToyTraining& other) { other.plan.policy = ReductionPolicy::kPerStep; }});
  for (const auto& change : changes) {
    ToyTraining other = training;
    change(other);
    strict = true;
    EXPECT_THAT(error_of(ErrorCode::kCheckpoint, [&] { (void)train_toy(other); }),
                AllOf(HasSubstr("from the middle of a step"), HasSubstr("4 ranks, 3 micro-steps, per_micro_step")));
    strict = false;
    (void)train_toy(other);
    EXPECT_EQ(missing, std::vector<std::string>{"gradients of 1 micro-steps"});
  }
}

}  // namespace
}  // namespace zeroth::test
