// Documents as a whole: what is no JSON, what is too much, and how it is reported.
#include "unit/engine/config_test_support.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::Not;

/// A folder of one test, removed also when the test fails.
class ConfigFile : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "zeroth-config-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path write(std::string_view text) {
    const std::filesystem::path path = folder_ / "zero3.json";
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  static std::string refusal(const std::filesystem::path& path) {
    try {
      static_cast<void>(Config::from_file(path));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kConfig);
      EXPECT_THAT(error.what(), HasSubstr(path.string()));
      return error.what();
    }
    ADD_FAILURE() << "accepted: " << path;
    return {};
  }

  std::filesystem::path folder_{};
};

TEST_F(ConfigFile, IsReadWithTheLineOfEachKey) {
  const auto path = write("{\n  \"zero_optimization\": {\n    \"stage\": 3\n  },\n\n  \"train_batch_size\": 8\n}\n");
  const Config config = Config::from_file(path);
  EXPECT_EQ(config.zero.stage, 3);
  EXPECT_EQ(config.train_batch_size, 8);
  EXPECT_EQ(config.origin_of("/zero_optimization/stage"), path.string() + ":3");
  EXPECT_EQ(config.origin_of("/train_batch_size"), path.string() + ":6");
  EXPECT_EQ(config.origin_of("/gradient_clipping"), "default");
  EXPECT_THAT(config.describe(), ::testing::Contains("/zero_optimization/stage = 3 (" + path.string() + ":3)"));
}

TEST_F(ConfigFile, MustBeAReadableRegularFileWithinTheLimit) {
  EXPECT_THAT(refusal(folder_ / "missing.json"), HasSubstr("not there"));
  EXPECT_THAT(refusal(folder_), HasSubstr("is a directory"));
  EXPECT_THAT(refusal(write("")), HasSubstr("empty"));
  EXPECT_THAT(refusal(write(" \n\t ")), HasSubstr("empty"));
  EXPECT_THAT(refusal(write("{" + std::string(std::size_t{16} << 20, ' ') + "}")), HasSubstr("too large"));
  const std::filesystem::path pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(refusal(pipe), HasSubstr("not a regular file"));
  const std::string nested = "{" + std::string((std::size_t{16} << 20) - 2, ' ') + "}";
  EXPECT_NO_THROW(static_cast<void>(Config::from_file(write(nested))));
}

TEST(ConfigDocument, EmptyObjectGivesTheDefaults) {
  const Config config = read("{}");
  EXPECT_EQ(config, Config{});
  EXPECT_TRUE(config.hints.empty());
  EXPECT_EQ(config.gradient_clipping, 0.0);
}

TEST(ConfigDocument, IsStrictJson) {
  const std::vector<std::string> texts{
      "{",
      "}",
      "[",
      "{\"a\"}",
      "{\"train_batch_size\": 8,}",
      "{\"train_batch_size\": 8} x",
      "{\"train_batch_size\": 8}{}",
      "{// comment\n}",
      "{'train_batch_size': 8}",
      "{\"train_batch_size\": 08}",
      "{\"steps_per_print\": nan}",
      "{\"steps_per_print\": +Infinity}",
      "{\"steps_per_print\": Infinity1}",
      "{\"steps_per_print\": 1Infinity}",
      "{\"steps_per_print\": 1 Infinity}",
      "{\"steps_per_print\": - Infinity}",
      "{NaN: 1}",
      "NaN Infinity",
      "{\"gradient_clipping\": 1e999}",
      "{\"gradient_clipping\": -1e999}",
      "{\"optimizer\": {\"type\": \"\xff\xfe\"}}",
      "{\"optimizer\": {\"type\": \"\xc0\xaf\"}}",
      "{\"\xed\xa0\x80\": 1}",
      std::string("{\"a\0b\": 1}", 10),
      std::string("\0", 1),
      "{\"train_batch_size\": \"8",
      "\xff\xfe{\0}\0",
  };
  for (const std::string& text : texts) {
    const ConfigProblem problem = problem_of(text);
    EXPECT_TRUE(problem.what == "this is not JSON" || problem.what == "a number is too large") << problem.text();
    for (const char c : problem.text()) {
      EXPECT_TRUE(c >= 0x20 && c < 0x7f) << "unprintable byte in a message about " << text;
    }
  }
}

TEST(ConfigDocument, PythonsNumbersWithoutAnEndAreRead) {
  const Config config = read(
      "{\"log_level\": [1, -Infinity ,-2e3,{\"NaN\": NaN}, \"\\\"Infinity\", 3,Infinity],\n"
      "\"steps_per_print\": 7}");
  EXPECT_THAT(config.hints,
              ElementsAre(Field(&HintNote::given, "[1,-Infinity,-2000.0,{\"NaN\":NaN},\"\\\"Infinity\",3,Infinity]"),
                          Field(&HintNote::given, "7")));
  EXPECT_EQ(config.hints[1].origin, "test.json:2");
  const ConfigProblem problem = problem_of(R"({"gradient_clipping": Infinity, "steps_per_print": 1})");
  EXPECT_EQ(problem.what, "wrong value");
  EXPECT_EQ(problem.got, "Infinity");
  EXPECT_EQ(problem_of(R"({"optimizer": {"params": {"betas": [0.9, NaN]}}})").got, "[0.9,NaN]");
  EXPECT_EQ(problem_of(R"({"train_batch_size": -Infinity})").got, "-Infinity");
  EXPECT_EQ(problem_of(R"({"amp": Infinity})").got, "Infinity");
  EXPECT_EQ(problem_of("NaN").what, "the document is no object");
  const std::vector<ConfigOverride> one{{"/steps_per_print", "Infinity", "--x"}};
  EXPECT_THAT(read("{}", one).hints, ElementsAre(Field(&HintNote::given, "Infinity")));
}

TEST(ConfigDocument, AValueUnderASectionThatIsNoneIsTheSectionsFault) {
  EXPECT_EQ(problem_of(R"({"zeroth": 3, "sequence_parallel_size": 2})").pointer, "/zeroth");
  EXPECT_EQ(problem_of(R"({"zeroth": {"mesh": "x"}, "sequence_parallel_size": 2})").pointer, "/zeroth/mesh");
}

TEST(ConfigDocument, SaysTheLineWhereItBreaks) {
  EXPECT_EQ(problem_of("{\n\"train_batch_size\": 8,\n\"bf16\": {]\n}").origin, "test.json:3");
}

TEST(ConfigDocument, AcceptsAByteOrderMark) {
  EXPECT_EQ(read("\xef\xbb\xbf{\"train_batch_size\": 8}").train_batch_size, 8);
}

TEST(ConfigDocument, MustBeAnObject) {
  for (const char* text : {"[]", "3", "null", "\"zero\"", "true", "[{\"train_batch_size\": 8}]"}) {
    EXPECT_EQ(problem_of(text).what, "the document is no object") << text;
  }
}

TEST(ConfigDocument, NestingIsBounded) {
  for (const std::size_t depth : {std::size_t{33}, std::size_t{1'000'000}}) {
    EXPECT_EQ(problem_of("{\"amp\": " + std::string(depth, '[')).what, "brackets are nested too deep");
    std::string objects;
    for (std::size_t i = 0; i < depth; ++i) objects += "{\"a\":";
    EXPECT_EQ(problem_of(objects).what, "brackets are nested too deep");
  }
  // Within the bound it is the schema that judges.
  EXPECT_EQ(problem_of("{\"x\": " + std::string(31, '[') + std::string(31, ']') + "}").what, "unknown key");
}

TEST(ConfigDocument, DuplicateKeysAreErrorsAtAnyDepth) {
  const ConfigProblem top = problem_of("{\"train_batch_size\": 8,\n\"train_batch_size\": 8}");
  EXPECT_EQ(top.what, "the key is there twice");
  EXPECT_EQ(top.pointer, "/train_batch_size");
  EXPECT_EQ(top.origin, "test.json:2");
  EXPECT_THAT(top.hint, HasSubstr("test.json:1"));
  EXPECT_EQ(problem_of(R"({"bf16": {"enabled": true, "enabled": false}})").pointer, "/bf16/enabled");
  EXPECT_EQ(problem_of(R"({"amp": {"enabled": false, "x": [{"y": 1, "y": 2}]}})").pointer, "/amp/x/0/y");
  // The same name in two places is no duplicate.
  EXPECT_TRUE(problems_of(R"({"bf16": {"enabled": true}, "fp16": {"enabled": false}})").empty());
}

TEST(ConfigDocument, AllProblemsAreReportedTogether) {
  const std::string text = R"({
  "train_batch_size": 0,
  "zero_optimization": {"stge": 3, "stage": 4},
  "amp": {"enabled": true},
  "optimizer": {"type": "AdamV", "params": {"lr": -1}}
})";
  const std::vector<ConfigProblem> problems = problems_of(text);
  std::vector<std::string> pointers;
  for (const ConfigProblem& problem : problems) pointers.push_back(problem.pointer);
  EXPECT_THAT(pointers, ::testing::UnorderedElementsAre("/train_batch_size", "/zero_optimization/stge",
                                                        "/zero_optimization/stage", "/amp", "/optimizer/type",
                                                        "/optimizer/params/lr"));
  try {
    static_cast<void>(read(text));
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("6 problems in test.json"),
                      HasSubstr("test.json:3: /zero_optimization/stge: unknown key; hint: did you mean \"stage\"?"),
                      HasSubstr("test.json:5: /optimizer/params/lr: wrong value; expected a number of at least 0.0; "
                                "got -1"),
                      HasSubstr("did you mean \"AdamW\"?")));
  }
}

TEST(ConfigDocument, OneProblemFillsTheContextOfTheError) {
  try {
    static_cast<void>(read("{\n\"zero_optimization\": {\"stage\": 4}}"));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kConfig);
    EXPECT_EQ(exit_code(error.code()), 78);
    EXPECT_THAT(error.message(), HasSubstr("test.json:2"));
    EXPECT_EQ(error.context().which, "/zero_optimization/stage");
    EXPECT_EQ(error.context().expected, "an integer from 0 to 3");
    EXPECT_EQ(error.context().got, "4");
  }
}

TEST(ConfigDocument, AReportDoesNotGrowWithTheDocument) {
  std::string text = "{";
  for (int i = 0; i < 200'000; ++i) text += "\"unknown key number " + std::to_string(i) + "\": 0,";
  text += "\"" + std::string(1'000'000, 'x') + "\": \"" + std::string(1'000'000, 'y') + "\"}";
  try {
    static_cast<void>(read(text));
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.problems().size(), 50U);
    EXPECT_LT(std::string_view(error.what()).size(), 20'000U);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("200001 problems"), HasSubstr("and 199951 more")));
  }
}

TEST(ConfigDocument, UnknownKeysNameTheNearest) {
  EXPECT_EQ(problem_of(R"({"train_batchsize": 8})").hint, "did you mean \"train_batch_size\"?");
  EXPECT_EQ(problem_of(R"({"zero_optimisation": {"stage": 3}})").hint, "did you mean \"zero_optimization\"?");
  EXPECT_EQ(problem_of(R"({"zeroth": {"ring_slot": 3}})").hint, "did you mean \"ring_slots\"?");
  EXPECT_EQ(problem_of(R"({"fp16": {"enabeld": true}})").hint, "did you mean \"enabled\"?");
  // In the wrong section: the right one is named.
  EXPECT_EQ(problem_of(R"({"overlap_comm": true})").hint, "there is /zero_optimization/overlap_comm");
  EXPECT_EQ(problem_of(R"({"qqqqqqqqqq": 1})").hint, "");
  // Names that JSON pointers escape.
  EXPECT_EQ(problem_of(R"({"a/b~c": 1})").pointer, "/a~1b~0c");
}

TEST(ConfigDocument, SectionsMustBeObjectsOrNull) {
  for (const char* name : {"optimizer", "scheduler", "zero_optimization", "bf16", "zeroth", "fp16", "aio"}) {
    const std::string key = "{\"" + std::string(name) + "\": ";
    EXPECT_EQ(problem_of(key + "true}").pointer, "/" + std::string(name));
    EXPECT_EQ(problem_of(key + "[]}").pointer, "/" + std::string(name));
    EXPECT_TRUE(problems_of(key + "null}").empty()) << name;
    EXPECT_TRUE(problems_of(key + "{}}").empty()) << name;
  }
}

TEST(ConfigDocument, AliasesAreReadAsTheKeyTheyStandFor) {
  const Config config = read("{\n\"bfloat16\": {\n\"enabled\": true}}");
  EXPECT_TRUE(config.bf16);
  EXPECT_EQ(config.origin_of("/bf16/enabled"), "test.json:3");
  EXPECT_EQ(problem_of(R"({"bfloat16": {"enabeld": true}})").hint, "did you mean \"enabled\"?");
  const ConfigProblem twice = problem_of(R"({"bf16": {"enabled": true}, "bfloat16": {"enabled": false}})");
  EXPECT_EQ(twice.what, "the same thing is given under two names");
  const Config hint = read(R"({"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": true}})");
  EXPECT_THAT(hint.hints,
              ElementsAre(Field(&HintNote::pointer, "/zero_optimization/stage3_gather_16bit_weights_on_model_save")));
}

TEST(ConfigDocument, DeepSpeedsPipelineSectionIsRead) {
  const Config config = read(R"({"pipeline": {"stages": 2, "partition": "uniform", "seed_layers": false,
      "activation_checkpoint_interval": 2, "pipe_partitioned": true, "grad_partitioned": true}})");
  EXPECT_EQ(config.mesh.pp, 2);
  EXPECT_EQ(config.pipeline.split, "uniform");
  EXPECT_EQ(config.pipeline.checkpoint_interval, 2);
  EXPECT_THAT(config.hints, ElementsAre(Field(&HintNote::pointer, "/pipeline/grad_partitioned"),
                                        Field(&HintNote::pointer, "/pipeline/pipe_partitioned"),
                                        Field(&HintNote::pointer, "/pipeline/seed_layers")));
  EXPECT_EQ(read(R"({"pipeline": {"partition": "best"}, "zeroth": {"mesh": {"pp": 4}}})").pipeline.split, "balanced");
  for (const auto& [member, pointer] : std::vector<std::pair<std::string, std::string>>{
           {R"("partition": "type:Block")", "/zeroth/pipeline/split"},
           {R"("stages": "auto")", "/zeroth/mesh/pp"},
           {R"("stage": 2)", "/pipeline/stage"},
       }) {
    EXPECT_EQ(problem_of(R"({"pipeline": {)" + member + "}}").pointer, pointer);
  }
  EXPECT_EQ(problem_of(R"({"pipeline": {"stage": 2}})").hint, "did you mean \"stages\"?");
}

TEST(ConfigOverrides, WinOverTheDocumentAndKeepTheirOrigin) {
  const std::vector<ConfigOverride> overrides{{"/zero_optimization/stage", "2", "--zero-stage"},
                                              {"/optimizer/params/lr", "0.5", "--lr"},
                                              {"/bf16/enabled", "true", "--dtype"}};
  const Config config =
      read(R"({"zero_optimization": {"stage": 3}, "optimizer": {"params": {"lr": "auto"}}})", overrides);
  EXPECT_EQ(config.zero.stage, 2);
  EXPECT_EQ(config.optimizer.lr, 0.5);
  EXPECT_TRUE(config.bf16);
  EXPECT_EQ(config.origin_of("/zero_optimization/stage"), "--zero-stage");
  EXPECT_EQ(config.origin_of("/bf16/enabled"), "--dtype");
}

TEST(ConfigOverrides, AreHeldToTheSchema) {
  const std::vector<ConfigOverride> stage{{"/zero_optimization/stage", "7", "--zero-stage"}};
  EXPECT_EQ(problem_of("{}", stage).origin, "--zero-stage");
  const std::vector<ConfigOverride> unknown{{"/zero_optimization/stge", "3", "--x"}};
  EXPECT_EQ(problem_of("{}", unknown).what, "unknown key");
  for (const ConfigOverride& bad :
       {ConfigOverride{"stage", "3", "--x"}, ConfigOverride{"", "3", "--x"},
        ConfigOverride{"/zero_optimization/stage", "", "--x"}, ConfigOverride{"/zero_optimization/stage", "nan", "--x"},
        ConfigOverride{"/zero_optimization/stage", "{", "--x"}}) {
    const std::vector<ConfigOverride> one{bad};
    EXPECT_EQ(problem_of("{}", one).what, "the override cannot be used");
  }
  // Where several are wrong, each keeps its origin, and the first line says whose they are.
  const std::vector<ConfigOverride> two{{"/zero_optimization/stage", "7", "--zero-stage"},
                                        {"/zero_optimization/stge", "3", "--x"}};
  for (const auto& [document, says] : {std::pair{"{}", "2 problems in what overrides test.json\n"},
                                       {R"({"amp": 3})", "3 problems in test.json and in what overrides it\n"}}) {
    try {
      static_cast<void>(read(document, two));
      FAIL();
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(says));
    }
  }
  // A section that is left open gives way, a mistake does not.
  const std::vector<ConfigOverride> through{{"/bf16/enabled", "true", "--dtype"}};
  EXPECT_TRUE(read(R"({"bf16": null})", through).bf16);
  EXPECT_TRUE(read(R"({"bf16": "auto"})", through).bf16);
  EXPECT_EQ(problem_of(R"({"bf16": 3})", through).pointer, "/bf16");
}

TEST(ConfigDocument, KeysWithoutAnEffectAreHints) {
  const auto hints = [](const char* text) {
    std::string all;
    for (const HintNote& hint : read(text).hints) all += hint.pointer + ": " + hint.instead + "; ";
    return all;
  };
  EXPECT_THAT(hints(R"({"zero_optimization": {"stage": 1, "offload_optimizer": {"nvme_path": "/d"}}})"),
              HasSubstr("nvme_path: no effect: device \"nvme\""));
  EXPECT_THAT(hints(R"({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}})"),
              HasSubstr("ratio: no effect"));
  EXPECT_THAT(hints(R"({"zeroth": {"update": {"clip_by": "previous_norm"}}})"), HasSubstr("clip_by: no effect"));
  EXPECT_THAT(hints(R"({"zero_optimization": {"stage": 1,
      "offload_optimizer": {"device": "nvme", "nvme_path": "/d:/e:/d"}}})"),
              HasSubstr("a folder is named twice"));
  EXPECT_EQ(hints(R"({"gradient_clipping": 1, "zeroth": {"update": {"clip_by": "previous_norm"}},
      "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/d:/e"}}})"),
            "");
}

}  // namespace
}  // namespace zeroth::test
