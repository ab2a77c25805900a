#include "support/error_of.h"

#include <zeroth/program/passes.h>
#include <zeroth/program/schedules.h>
#include <zeroth/program/step_program.h>

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace zeroth {
namespace {

using test::error_of;

constexpr auto kLastKind = static_cast<int>(ActionKind::kStep);

/// Any action that has its numbers.
Action random_action(std::mt19937& random, int chunks, int micro_batches) {
  const auto below = [&](int bound) { return std::uniform_int_distribution(0, bound - 1)(random); };
  while (true) {
    const Action action{.kind = static_cast<ActionKind>(below(kLastKind + 1)),
                        .chunk = below(2) == 0 ? below(chunks) : -1,
                        .micro_batch = below(2) == 0 ? below(micro_batches) : -1};
    if (has_its_numbers(action)) return action;
  }
}

StepProgram random_program(std::mt19937& random) {
  const auto below = [&](int bound) { return std::uniform_int_distribution(0, bound - 1)(random); };
  const int ranks = 1 + below(5);
  StepProgram program{.schedule = "s" + std::to_string(below(1000)), .micro_batches = 1 + below(1000)};
  program.inexact = below(4) == 0;
  program.actions.resize(static_cast<std::size_t>(ranks));
  for (int chunks = 1 + below(12); chunks > 0; --chunks) program.rank_of_chunk.push_back(below(ranks));
  const bool late = program.inexact && below(2) == 0;
  for (int chunk = 0; late && chunk < program.chunks(); ++chunk) program.late.push_back(below(5));
  for (std::vector<Action>& actions : program.actions) {
    for (int count = below(40); count > 0; --count)
      actions.push_back(random_action(random, program.chunks(), program.micro_batches));
  }
  return program;
}

TEST(ProgramText, RandomProgramsComeBack) {
  std::mt19937 random(27);
  for (int i = 0; i < 10'000; ++i) {
    const StepProgram program = random_program(random);
    const std::string text = to_text(program);
    ASSERT_EQ(parse_program(text), program) << text;
    ASSERT_EQ(to_text(parse_program(text)), text);
  }
}

TEST(ProgramText, IsTheOneOfTheHeader) {
  EXPECT_EQ(to_text(lower(make_schedule("1f1b", {.ranks = 2, .micro_batches = 2}))),
            "zeroth-program 1 schedule=1f1b ranks=2 micro_batches=2 chunks=0,1\n"
            "0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE STEP\n"
            "1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE STEP\n");
}

TEST(ProgramText, BlankLinesAndCommentsDoNotCount) {
  const StepProgram program = make_schedule("gpipe", {.ranks = 2, .micro_batches = 1});
  EXPECT_EQ(parse_program("# a pipeline\n\n zeroth-program  1 schedule=gpipe ranks=2 micro_batches=1\tchunks=0,1\r\n"
                          "  # rank 0\n0: 0F0   0B0\n\n1: 1F0 1B0"),
            program);
}

TEST(ProgramText, ErrorsNameLineAndWord) {
  const std::string head = "zeroth-program 1 schedule=x ranks=2 micro_batches=2 chunks=0,1\n";
  struct Case {
    std::string text;
    std::string error;
  };
  for (const auto& [text, error] : std::vector<Case>{
           {"", "this is no program"},
           {"zeroth 1", "line 1, word 1; expected: zeroth-program; got: \"zeroth\""},
           {"zeroth-program 2", "line 1, word 2; expected: 1; got: \"2\""},
           {"zeroth-program 1 ranks=2", "line 1, word 3; expected: schedule=...; got: \"ranks=2\""},
           {"zeroth-program 1 schedule=x ranks=0",
            "line 1, word 4; expected: an integer from 1 to 65536; got: \"ranks=0\""},
           {"zeroth-program 1 schedule=x ranks=2 micro_batches=99999999999", "line 1, word 5; expected: an integer"},
           {"zeroth-program 1 schedule=x ranks=2 micro_batches=1 chunks=0,2",
            "line 1, word 6; expected: an integer from 0 to 1"},
           {"zeroth-program 1 schedule=x ranks=2 micro_batches=1 chunks=0,", "line 1, word 6"},
           {"zeroth-program 1 schedule=x ranks=2 micro_batches=1 chunks=0 exact",
            "line 1, word 7; expected: its end, or inexact"},
           {"zeroth-program 1 schedule=x ranks=2 micro_batches=1 chunks=0 late=1",
            "line 1, word 8; expected: inexact; got: the end of the line"},
           {"zeroth-program 1 schedule=x ranks=2 micro_batches=1 chunks=0,1 late=1 inexact",
            "line 1, word 7; expected: 2 numbers"},
           {"zeroth-program 1 schedule=x ranks=2 micro_batches=1 chunks=0 inexact 1",
            "line 1, word 8; expected: its end"},
           {"zeroth-program 1 schedule=\x01 ranks=2", "line 1, word 3; expected: a word; got: \"schedule=?\""},
           {head + "0: 0F0\n", "a rank of the program is missing"},
           {head + "1: 0F0\n", "line 2, word 1; expected: 0:; got: \"1:\""},
           {head + "0: 0F0 0X1\n1:", "line 2, word 3; expected: a chunk, an action and a micro-batch"},
           {head + "0: 0F0\n1: 1B0 1F-1\n", "line 3, word 3"},
           {head + "0:\n1:\n2: 0F0\n", "line 4, word 1; expected: the end; got: \"2:\""}}) {
    EXPECT_NE(error_of(ErrorCode::kUsage, [&] { (void)parse_program(text); }).find(error), std::string::npos)
        << text << "\n"
        << error_of(ErrorCode::kUsage, [&] { (void)parse_program(text); });
  }
}

TEST(ProgramText, ActionsHaveTheNumbersOfTheirKind) {
  for (const char* text :
       {"F",     "F0",    "0F",  "00F0",          "0F00",          "0F0 ", "0f0", "0UNSHARD1", "UNSHARD", "0STEP",
        "STEP0", "0V_S0", "V_S", "99999999999F0", "0F99999999999", "-1F0", "0",   "",          "0SEND_F", "REDUCE"}) {
    EXPECT_NE(error_of(ErrorCode::kUsage, [&] { (void)parse_action(text); }).find("this is no action"),
              std::string::npos)
        << text;
  }
  for (const char* text : {"0F0", "12SEND_B345", "0UNSHARD", "STEP", "V_S0", "3FETCH", "3FLUSH2", "1RECOMPUTE0"})
    EXPECT_EQ(to_text(parse_action(text)), text);
}

}  // namespace
}  // namespace zeroth
