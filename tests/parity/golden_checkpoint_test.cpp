// Checkpoints that an earlier Zeroth wrote: each format version that there ever was is read, to the bit, by any world.
//
// tests/parity/golden_checkpoints/format-1/ and format-2/ were written by this test (ZEROTH_WRITE_GOLDEN=FOLDER) on
// 2026-11-25 and 2026-11-28: two ranks at stage 2, step 3; in format 2 matrices lie in memory by columns. What they
// must hold is computed here.
#include "support/checkpoint_folder.h"
#include "support/thread_ranks.h"
#include "toy_engine.h"

#include <zeroth/base/text.h>
#include <zeroth/checkpoint/folder.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <tuple>

namespace zeroth::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kSaved = 3;

ToyTraining golden_training(DType dtype, int format) {
  ToyTraining training;
  training.model = {.width = 6, .blocks = 2};
  training.model.dtype = dtype;
  training.model.frozen_blocks = {1};
  if (format == kOrderedFormat) training.model.memory_order = {1, 0};
  training.model.round_gradients = dtype == DType::kBFloat16;
  training.plan = zero_plan(2, {"dp"});
  training.world = 2;
  training.steps = 6;
  training.reports_memory = false;
  return training;
}

std::string folder_of(int format, DType dtype) {
  return std::string(ZEROTH_GOLDEN_CHECKPOINTS) + "/format-" + std::to_string(format) + "/" +
         std::string(name_of(dtype));
}

class GoldenCheckpoint : public ::testing::TestWithParam<std::tuple<DType, int>> {};
INSTANTIATE_TEST_SUITE_P(DTypes, GoldenCheckpoint,
                         ::testing::Combine(::testing::Values(DType::kFloat32, DType::kBFloat16),
                                            ::testing::Values(kCheckpointFormat, kOrderedFormat)),
                         [](const auto& test) {
                           return std::string(name_of(std::get<0>(test.param))) + "_format_" +
                                  std::to_string(std::get<1>(test.param));
                         });

TEST_P(GoldenCheckpoint, OfEveryFormatIsReadByAnyWorldAndGoesOnWithTheSameBits) {
  const DType dtype = std::get<0>(GetParam());
  const int format = std::get<1>(GetParam());
  ToyTraining whole = golden_training(dtype, format);
  if (const char* const to = std::getenv("ZEROTH_WRITE_GOLDEN")) {
    whole.after_step = [&](Engine& engine, ToyModel&, const StepResult& step) {
      if (step.step == kSaved)
        (void)engine.save(std::string(to) + "/format-" + std::to_string(format) + "/" + std::string(name_of(dtype)));
    };
  }
  const ToyOutcome end = train_toy(whole);
  ToyTraining three = golden_training(dtype, format);
  three.steps = kSaved;
  const auto expected = train_toy(three).values;
  ASSERT_TRUE(fs::is_directory(folder_of(format, dtype))) << "no golden checkpoint of format " << format;
  for (const auto& [world, stage] : {std::pair{1, 0}, {2, 3}, {3, 1}, {4, 2}}) {
    ToyTraining training = golden_training(dtype, format);
    training.world = world;
    training.plan = zero_plan(stage, {"dp"});
    training.first_step = kSaved;
    training.model_seed = 99;
    training.at_start = [&](Engine& engine, ToyModel& model) {
      const LoadReport report = engine.load(folder_of(format, dtype));
      require(report.manifest.format == format && report.manifest.step == kSaved, "what it says of itself");
      for (int param = 0; param < static_cast<int>(model.structure().params.size()); ++param)
        require(model.value(param) == expected[static_cast<std::size_t>(param)], "the values of the third step");
    };
    const ToyOutcome resumed = train_toy(training);
    if (world == whole.world) {
      EXPECT_EQ(resumed.values, end.values);
    }
  }
}

TEST(NewerCheckpoint, IsRefusedWithBothNumbers) {
  const CheckpointFolder folder;
  const std::string golden = folder_of(kCheckpointFormat, DType::kFloat32) + "/" + checkpoint_name(kSaved);
  fs::create_directories(folder.text());
  fs::copy(golden, folder.step(kSaved));
  std::ifstream file(golden + "/" + kManifestFile);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::string said = "\"format\": " + std::to_string(kCheckpointFormat);
  ASSERT_NE(text.find(said), std::string::npos);
  text.replace(text.find(said), said.size(), "\"format\": " + std::to_string(kOrderedFormat + 1));
  text.resize(text.find(",\n\"digest\""));
  char digest[64];
  std::snprintf(digest, sizeof digest, ",\n\"digest\": \"%016llx\"}\n",
                static_cast<unsigned long long>(digest64(text)));
  std::ofstream(folder.step(kSaved) + "/" + kManifestFile) << text << digest;
  ToyTraining training = golden_training(DType::kFloat32, kCheckpointFormat);
  training.at_start = [&](Engine& engine, ToyModel&) { (void)engine.load(folder.step(kSaved)); };
  EXPECT_THAT(
      message_of(training),
      AllOf(HasSubstr("a checkpoint has another format"),
            HasSubstr("expected: " + std::to_string(kCheckpointFormat) + " or " + std::to_string(kOrderedFormat)),
            HasSubstr("got: " + std::to_string(kOrderedFormat + 1)), HasSubstr("or a newer one")));
}

}  // namespace
}  // namespace zeroth::test
