#include "options.h"

#include "temp_folder.h"

#include <zeroth/base/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace gpt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using zeroth::Error;
using zeroth::ErrorCode;

CommandLine parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), {"zeroth-gpt", "--data", "text"});
  return parse_command_line(static_cast<int>(arguments.size()), arguments.data());
}

std::string usage_error_of(const std::vector<const char*>& arguments) {
  try {
    static_cast<void>(parse(arguments));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return error.what();
  }
  return "nothing thrown";
}

TEST(CommandLine, ReadsEveryArgumentOfTheModelAndTheRun) {
  const Options options = parse({"--layers",        "3",    "--d-model",    "96",        "--heads",      "6",
                                 "--seq",           "33",   "--batch",      "5",         "--steps",      "17",
                                 "--dtype",         "bf16", "--lr",         "0.25",      "--clip",       "0",
                                 "--seed",          "99",   "--json",       "out.jsonl", "--accumulate", "2",
                                 "--target",        "2.5",  "--zero-stage", "1",         "--sample",     "7",
                                 "--no-train-table"})
                              .options;
  EXPECT_EQ(options.corpus.folder, "text");
  EXPECT_EQ(options.layers, 3);
  EXPECT_EQ(options.d_model, 96);
  EXPECT_EQ(options.heads, 6);
  EXPECT_EQ(options.seq, 33);
  EXPECT_EQ(options.batch, 5);
  EXPECT_EQ(options.accumulate, 2);
  EXPECT_EQ(options.steps, 17);
  EXPECT_EQ(options.dtype, "bf16");
  EXPECT_EQ(options.lr, 0.25);
  EXPECT_EQ(options.clip, 0.0);
  EXPECT_EQ(options.seed, 99U);
  EXPECT_EQ(options.zero_stage, 1);
  EXPECT_EQ(options.target_loss, 2.5);
  EXPECT_EQ(options.eval_every, 10) << "a target needs validations";
  EXPECT_EQ(options.json_path, "out.jsonl");
  EXPECT_FALSE(options.table);
}

TEST(CommandLine, DerivesHeadsFromTheWidth) {
  EXPECT_EQ(parse({"--d-model", "320"}).options.heads, 5);
  EXPECT_EQ(parse({"--d-model", "32"}).options.heads, 1);
}

TEST(CommandLine, TheLastOfRepeatedValuesWinsAndListsGrow) {
  const Options options =
      parse({"--steps", "5", "--suffix", ".py", "--batch", "2", "--suffix", ".h", "--steps", "6", "--batch", "3"})
          .options;
  EXPECT_EQ(options.steps, 6);
  EXPECT_EQ(options.batch, 3);
  EXPECT_THAT(options.corpus.suffixes, ElementsAre(".py", ".h"));
}

TEST(CommandLine, RefusesWhatCannotBeMeant) {
  EXPECT_THAT(usage_error_of({"--layer", "3"}), HasSubstr("--layer"));
  EXPECT_THAT(usage_error_of({"--zero-stage", "4"}), HasSubstr("--zero-stage"));
  EXPECT_THAT(usage_error_of({"--layers", "0"}), HasSubstr("--layers"));
  EXPECT_THAT(usage_error_of({"--layers", "three"}), HasSubstr("--layers"));
  EXPECT_THAT(usage_error_of({"--dtype", "int8"}), HasSubstr("int8"));
  EXPECT_THAT(usage_error_of({"--batch", "0"}), HasSubstr("--batch"));
  EXPECT_THAT(usage_error_of({"--lr", "-1"}), HasSubstr("--lr"));
  EXPECT_THAT(usage_error_of({"--target", "unigram"}), HasSubstr("bigram"));
  EXPECT_THAT(usage_error_of({"--d-model", "100", "--heads", "3"}), HasSubstr("--heads"));
  EXPECT_THAT(usage_error_of({"--d-model", "9", "--heads", "3"}), HasSubstr("even"));
  EXPECT_THAT(usage_error_of({"--target", "2", "--eval-windows", "0"}), HasSubstr("--eval-windows"));
  EXPECT_THAT(usage_error_of({"--sample", "9", "--prompt", ""}), HasSubstr("--prompt"));
  const char* only_program[] = {"zeroth-gpt"};
  EXPECT_THROW(static_cast<void>(parse_command_line(1, only_program)), Error) << "--data is required";
}

TEST(CommandLine, HelpListsTheArgumentsAndStops) {
  const CommandLine line = parse({"--help"});
  ASSERT_TRUE(line.help.has_value());
  for (const char* name : {"--zero-stage", "--data", "--config", "--target-loss", "--export"}) {
    EXPECT_THAT(*line.help, HasSubstr(name));
  }
}

TEST(Settings, DefaultsAreAdamWWithCosineOnZero3) {
  const Settings settings = make_settings(Options{.steps = 300}, 2);
  const zeroth::Config& config = settings.config;
  EXPECT_EQ(config.zero.stage, 3);
  EXPECT_EQ(config.optimizer.type, "AdamW");
  EXPECT_EQ(config.optimizer.lr, 1e-3);
  EXPECT_THAT(config.optimizer.moments(), ElementsAre(0.9, 0.95));
  EXPECT_EQ(config.optimizer.decay(), 0.1);
  EXPECT_EQ(config.scheduler.type, "WarmupCosineLR");
  EXPECT_EQ(config.scheduler.total_num_steps, 300);
  EXPECT_EQ(config.scheduler.warmup_num_steps, 30);
  EXPECT_EQ(config.gradient_clipping, 1.0);
  EXPECT_FALSE(config.bf16);
  EXPECT_EQ(settings.batch, (zeroth::BatchSizes{.train = 16, .micro = 8, .accumulate = 1}));
  EXPECT_EQ(settings.dtype, "fp32");
  EXPECT_THAT(settings.notes, IsEmpty());
}

TEST(Settings, ArgumentsWinOverTheFileAndSaySo) {
  const test::TempFolder folder;
  Options options = parse({"--lr", "0.5", "--zero-stage", "2", "--batch", "3", "--dtype", "fp32"}).options;
  options.config_path = folder.write("c.json", R"({"zero_optimization": {"stage": 2, "overlap_comm": true},
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": true},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})");

  const Settings settings = make_settings(options, 2);

  EXPECT_EQ(settings.config.optimizer.type, "SGD");
  EXPECT_EQ(settings.config.optimizer.lr, 0.5);
  EXPECT_EQ(settings.config.zero.stage, 2);
  EXPECT_FALSE(settings.config.bf16);
  EXPECT_EQ(settings.batch, (zeroth::BatchSizes{.train = 6, .micro = 3, .accumulate = 1}));
  EXPECT_EQ(settings.dtype, "fp32");
  EXPECT_EQ(settings.config.origin_of("/optimizer/params/lr"), "--lr");
  EXPECT_THAT(settings.notes,
              ElementsAre(HasSubstr("--lr: /optimizer/params/lr = 0.5 replaces 0.1"),
                          HasSubstr("--dtype fp32: /bf16/enabled = false replaces true"),
                          "--batch: /train_micro_batch_size_per_gpu = 3 replaces 8 of " + options.config_path.string(),
                          HasSubstr("/train_batch_size = 6 replaces 64")))
      << "the stage is the same in both and needs no word";
}

TEST(Settings, ResolvesAutoAndKeepsTheRest) {
  const test::TempFolder folder;
  Options options{.steps = 50};
  options.config_path = folder.write("c.json", R"({"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true},
    "gradient_clipping": "auto", "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 7}}})");

  const Settings settings = make_settings(options, 1);

  EXPECT_EQ(settings.batch.micro, 8);
  EXPECT_EQ(settings.config.gradient_clipping, 1.0);
  EXPECT_EQ(settings.config.optimizer.lr, 1e-3);
  EXPECT_THAT(settings.config.optimizer.moments(), ElementsAre(0.9, 0.999))
      << "the file's optimizer keeps its own defaults";
  EXPECT_EQ(settings.config.scheduler.total_num_steps, 50);
  EXPECT_EQ(settings.config.scheduler.warmup_num_steps, 7);
  EXPECT_EQ(settings.dtype, "bf16");
  EXPECT_THAT(settings.notes, IsEmpty());
}

TEST(Settings, CompletesBatchSizesThatTheFileLeavesOpen) {
  const test::TempFolder folder;
  const auto batch_of = [&](const std::string& text, int world_size, std::vector<const char*> arguments = {}) {
    Options options = parse(std::move(arguments)).options;
    options.config_path = folder.write("c.json", text);
    return make_settings(options, world_size).batch;
  };
  using Sizes = zeroth::BatchSizes;
  EXPECT_EQ(batch_of(R"({"train_batch_size": 24})", 3), (Sizes{24, 8, 1}));
  EXPECT_EQ(batch_of(R"({"train_batch_size": 24, "gradient_accumulation_steps": 4})", 3), (Sizes{24, 2, 4}));
  EXPECT_EQ(batch_of(R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2})", 3), (Sizes{24, 2, 4}));
  EXPECT_EQ(batch_of(R"({"train_batch_size": "auto", "gradient_accumulation_steps": 5})", 3), (Sizes{120, 8, 5}));
  EXPECT_EQ(batch_of(R"({"train_batch_size": 24})", 3, {"--accumulate", "2"}), (Sizes{48, 8, 2}));
  EXPECT_THROW(batch_of(R"({"train_batch_size": 25})", 3), Error);
}

TEST(CommandLine, ReadsAMesh) {
  EXPECT_EQ(parse({"--mesh", "dp=2,tp=4,sp=3"}).options.mesh,
            (std::map<std::string, int>{{"dp", 2}, {"sp", 3}, {"tp", 4}}));
  EXPECT_EQ(parse({"--mesh", "tp=1048576"}).options.mesh, (std::map<std::string, int>{{"tp", 1 << 20}}));
  EXPECT_EQ(parse({"--mesh", "pp=3,dp=2"}).options.mesh, (std::map<std::string, int>{{"dp", 2}, {"pp", 3}}));
  EXPECT_EQ(parse({"--mesh", "ep=4"}).options.mesh, (std::map<std::string, int>{{"ep", 4}}));
  EXPECT_THAT(usage_error_of({"--experts", "2", "--choices", "3"}), HasSubstr("--experts 2 --choices 3"));
  EXPECT_THAT(parse({}).options.mesh, IsEmpty());
  for (const char* const wrong : {"dp", "tp=", "tp=0", "tp=-2", "tp=+2", "tp=2,", ",tp=2", "tp=2,tp=2", "dp=2;tp=2",
                                  "cp=2", "tp=1048577", "tp=99999999999999999999", "tp=2 ", "=2"}) {
    EXPECT_THAT(usage_error_of({"--mesh", wrong}), HasSubstr("list of the axes pp, dp, ep, sp and tp")) << wrong;
  }
}

TEST(Settings, RanksThatShareTheMatricesHaveOneBatch) {
  const test::TempFolder folder;
  const auto settings_of = [&](const std::string& text, int world_size, std::vector<const char*> arguments = {}) {
    Options options = parse(std::move(arguments)).options;
    options.config_path = folder.write("c.json", text);
    return make_settings(options, world_size);
  };
  using Sizes = zeroth::BatchSizes;
  const Settings settings = settings_of("{}", 6, {"--mesh", "tp=2"});
  EXPECT_EQ(settings.batch, (Sizes{24, 8, 1}));
  EXPECT_EQ(settings.data_ranks, 3);
  EXPECT_EQ(settings.config.mesh.tp, 2);
  EXPECT_EQ(settings_of(R"({"train_batch_size": 24})", 6, {"--mesh", "dp=3,tp=2"}).batch, (Sizes{24, 8, 1}));
  EXPECT_EQ(settings_of(R"({"tensor_parallel": {"autotp_size": 2}, "train_batch_size": "auto"})", 6).batch,
            (Sizes{24, 8, 1}));
  const Settings replaced = settings_of(R"({"zeroth": {"mesh": {"tp": 3}}})", 6, {"--mesh", "tp=2"});
  EXPECT_EQ(replaced.data_ranks, 3);
  EXPECT_THAT(replaced.notes, ElementsAre(HasSubstr("--mesh: /zeroth/mesh/tp = 2 replaces 3 of ")));
  const auto text_of = [&](const std::string& text, std::vector<const char*> arguments) -> std::string {
    try {
      static_cast<void>(settings_of(text, 4, std::move(arguments)));
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing thrown";
  };
  EXPECT_THAT(text_of("{}", {"--mesh", "tp=3"}), HasSubstr("does not fit the number of ranks"));
  EXPECT_EQ(settings_of(R"({"zeroth": {"mesh": {"sp": 2}}})", 8, {"--mesh", "tp=2"}).batch, (Sizes{16, 8, 1}));
  EXPECT_THAT(text_of(R"({"train_batch_size": 25, "train_micro_batch_size_per_gpu": 5})", {"--mesh", "tp=2"}),
              HasSubstr("train_batch_size"));
}

TEST(Settings, StagesOfAPipelineHaveOneBatch) {
  const Settings settings = make_settings(parse({"--mesh", "pp=2", "--accumulate", "4"}).options, 6);
  EXPECT_EQ(settings.stages, 2);
  EXPECT_EQ(settings.data_ranks, 3);
  EXPECT_EQ(settings.batch, (zeroth::BatchSizes{.train = 96, .micro = 8, .accumulate = 4}));
  EXPECT_EQ(make_settings(parse({"--mesh", "dp=3"}).options, 3).stages, 1);
  const test::TempFolder folder;
  Options options;
  options.config_path = folder.write("c.json", R"({"zeroth": {"mesh": {"pp": 4}}, "train_batch_size": 24})");
  const Settings of_file = make_settings(options, 8);
  EXPECT_EQ(of_file.stages, 4);
  EXPECT_EQ(of_file.data_ranks, 2);
  EXPECT_EQ(of_file.batch, (zeroth::BatchSizes{.train = 24, .micro = 12, .accumulate = 1}))
      << "dp is not the first axis";
}

TEST(Settings, LeavesWhatIsWrongToTheConfiguration) {
  const test::TempFolder folder;
  const auto text_of = [](const std::filesystem::path& path, std::optional<int> stage = std::nullopt) -> std::string {
    Options options;
    options.config_path = path;
    options.zero_stage = stage;
    try {
      static_cast<void>(make_settings(options, 1));
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing thrown";
  };
  EXPECT_THAT(text_of(folder.path() / "missing.json"), HasSubstr("missing.json"));
  EXPECT_THAT(text_of(folder.write("broken.json", "{\"a\": ")), HasSubstr("broken.json"));
  EXPECT_THAT(text_of(folder.write("list.json", "[1]")), HasSubstr("list.json"));
  EXPECT_THAT(text_of(folder.write("size.json", R"({"gradient_accumulation_steps": 0})")), HasSubstr("accumulation"));
  EXPECT_THAT(text_of(folder.write("misspelt.json", "{\n\"gradient_cliping\": 1}")), HasSubstr("misspelt.json:2"));
  EXPECT_THAT(text_of(folder.write("section.json", R"({"optimizer": 3})"), 2), HasSubstr("/optimizer"));
}

}  // namespace
}  // namespace gpt
