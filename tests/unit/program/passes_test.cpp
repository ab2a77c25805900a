#include "oracle.h"
#include "support/error_of.h"

#include <zeroth/program/passes.h>
#include <zeroth/program/schedules.h>
#include <zeroth/program/simulate.h>
#include <zeroth/program/verify.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

namespace zeroth {
namespace {

using test::error_of;

std::string line_of(const StepProgram& program, int rank) {
  std::string text;
  for (const Action& action : program.actions[static_cast<std::size_t>(rank)])
    text += (text.empty() ? "" : " ") + to_text(action);
  return text;
}

StepProgram schedule_of(const std::string& name, int ranks, int micro_batches) {
  return make_schedule(name, {.ranks = ranks, .micro_batches = micro_batches});
}

TEST(ProgramPasses, MessagesStandBesideTheirComputations) {
  const StepProgram program = add_messages(schedule_of("zb-v", 2, 1));
  // Chunks 1 and 2 are both on rank 1: nothing goes between them.
  EXPECT_EQ(line_of(program, 0), "0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 3W0 0RECV_B0 0I0 0W0");
  EXPECT_EQ(line_of(program, 1), "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 2W0 1I0 1SEND_B0 1W0");
}

TEST(ProgramPasses, ReceivesFollowTheOrderOfTheSends) {
  // Rank 1 computes micro-batch 1 first, rank 0 sends 0 first.
  const StepProgram crossed = parse_program(
      "zeroth-program 1 schedule=crossed ranks=2 micro_batches=2 chunks=0,1\n"
      "0: 0F0 0F1 0B0 0B1\n"
      "1: 1F1 1F0 1B1 1B0\n");
  const StepProgram program = lower(crossed);
  EXPECT_EQ(line_of(program, 0), "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0RECV_B0 0B0 0B1 0REDUCE STEP");
  EXPECT_EQ(line_of(program, 1), "1RECV_F0 1RECV_F1 1F1 1F0 1B1 1SEND_B1 1B0 1SEND_B0 1REDUCE STEP");
  verify(program);
  EXPECT_EQ(test::run_by_queues(program), "");
}

TEST(ProgramPasses, GathersAreAroundEachMicroBatchOrKept) {
  const StepProgram schedule = add_messages(schedule_of("1f1b", 2, 2));
  EXPECT_EQ(line_of(add_unshards(schedule, Gathers::kPerMicroBatch), 0),
            "0UNSHARD 0F0 0SEND_F0 0RESHARD 0UNSHARD 0F1 0SEND_F1 0RESHARD 0UNSHARD 0RECV_B0 0B0 0RESHARD "
            "0UNSHARD 0RECV_B1 0B1 0RESHARD");
  // The forward and the backward of one micro-batch share a gather.
  EXPECT_EQ(line_of(add_unshards(schedule, Gathers::kPerMicroBatch), 1),
            "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RESHARD 1UNSHARD 1RECV_F1 1F1 1B1 1SEND_B1 1RESHARD");
  EXPECT_EQ(line_of(add_unshards(schedule, Gathers::kKept), 1),
            "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RESHARD");
  EXPECT_EQ(add_unshards(schedule, Gathers::kNone), schedule);
  // W reads no parameters.
  EXPECT_EQ(line_of(add_unshards(add_messages(schedule_of("zb-h1", 2, 2)), Gathers::kPerMicroBatch), 1),
            "1UNSHARD 1RECV_F0 1F0 1I0 1SEND_B0 1RESHARD 1UNSHARD 1RECV_F1 1F1 1I1 1SEND_B1 1RESHARD 1W0 1W1");
}

TEST(ProgramPasses, RecomputeStandsBeforeTheGradientComes) {
  const StepProgram program = lower(schedule_of("1f1b", 2, 2), {.recompute = true});
  EXPECT_EQ(line_of(program, 0),
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECOMPUTE0 0RECV_B0 0B0 0RECOMPUTE1 0RECV_B1 0B1 0REDUCE STEP");
  // Its backwards follow their forwards: there is nothing to compute again.
  EXPECT_EQ(line_of(program, 1).find("RECOMPUTE"), std::string::npos);
  const StepProgram one = add_recompute(add_messages(schedule_of("gpipe", 2, 2)), {false, true});
  EXPECT_EQ(line_of(one, 0).find("RECOMPUTE"), std::string::npos);
  EXPECT_NE(line_of(one, 1).find("1RECOMPUTE0 1B0"), std::string::npos);
}

TEST(ProgramPasses, RecomputeKeepsTheInputsAlone) {
  const Costs costs{.chunks = {{.activation_bytes = 100, .input_bytes = 3}}};
  const StepProgram schedule = schedule_of("gpipe", 2, 8);
  EXPECT_EQ(simulate(lower(schedule), costs).ranks[0].most_bytes, 8 * 100);
  EXPECT_EQ(simulate(lower(schedule, {.recompute = true}), costs).ranks[0].most_bytes, 7 * 3 + 100);
}

TEST(ProgramPasses, OffloadMovesAwayWhatRests) {
  const StepProgram program = add_activation_offload(add_messages(schedule_of("gpipe", 1, 3)));
  EXPECT_EQ(line_of(program, 0), "0F0 0FLUSH0 0F1 0FLUSH1 0FETCH0 0F2 0FLUSH2 0FETCH1 0B0 0FETCH2 0B1 0B2");
  EXPECT_EQ(line_of(add_activation_offload(add_messages(schedule_of("gpipe", 1, 4)), 2), 0),
            "0F0 0FLUSH0 0F1 0FLUSH1 0FETCH0 0F2 0FLUSH2 0FETCH1 0F3 0FLUSH3 0FETCH2 0B0 0FETCH3 0B1 0B2 0B3");
  const StepProgram states = add_state_offload(add_step(schedule_of("zb-v", 1, 1)));
  EXPECT_EQ(line_of(states, 0), "0F0 1F0 1I0 1W0 0I0 0W0 0FETCH 1FETCH STEP 0FLUSH 1FLUSH");
}

TEST(ProgramPasses, OffloadHoldsLessThanTheSchedule) {
  for (const std::string& name : schedule_names()) {
    const ScheduleOptions options{.ranks = 4, .micro_batches = 16};
    const Simulation plain = simulate(lower(make_schedule(name, options)));
    const Simulation away = simulate(lower(make_schedule(name, options), {.offload_activations = true}));
    EXPECT_LT(away.ranks[0].most_pairs, plain.ranks[0].most_pairs) << name;
    EXPECT_EQ(away.step_time, plain.step_time) << name;  // copies take no time here
  }
}

TEST(ProgramPasses, AllTogetherArePassedByTheVerifier) {
  for (const std::string& name : schedule_names()) {
    for (const int p : {1, 2, 3}) {
      for (const int m : {1, 2, 5}) {
        for (int bits = 0; bits < 16; ++bits) {
          const LowerOptions options{.gathers = static_cast<Gathers>(bits % 3),
                                     .step = true,
                                     .recompute = (bits & 1) != 0,
                                     .offload_activations = (bits & 2) != 0,
                                     .offload_states = (bits & 4) != 0,
                                     .vocabulary = (bits & 8) != 0 ? Vocabulary::kOneBarrier : Vocabulary::kNone};
          const StepProgram program = lower(schedule_of(name, p, m), options);
          const auto refutation = refute(program);
          ASSERT_FALSE(refutation.has_value()) << refutation->what << "\n" << to_text(program);
          ASSERT_EQ(parse_program(to_text(program)), program);
        }
      }
    }
  }
}

TEST(ProgramPasses, NothingIsAddedTwice) {
  const StepProgram schedule = schedule_of("1f1b", 2, 4);
  const StepProgram whole = lower(
      schedule, {.gathers = Gathers::kKept, .recompute = true, .offload_activations = true, .offload_states = true});
  const auto twice = [&](const auto& pass) {
    const std::string text = error_of(ErrorCode::kUsage, [&] { (void)pass(whole); });
    EXPECT_NE(text.find("already has"), std::string::npos) << text;
  };
  twice([](const StepProgram& program) { return add_messages(program); });
  twice([](const StepProgram& program) { return add_recompute(program); });
  twice([](const StepProgram& program) { return add_activation_offload(program); });
  twice([](const StepProgram& program) { return add_state_offload(program); });
  twice([](const StepProgram& program) { return add_unshards(program, Gathers::kKept); });
  twice([](const StepProgram& program) { return add_reduces(program); });
  twice([](const StepProgram& program) { return add_step(program); });
  twice([](const StepProgram& program) { return add_vocabulary(program, Vocabulary::kOneBarrier); });
}

TEST(ProgramPasses, RefuseWhatTheyCannotAdd) {
  const StepProgram schedule = schedule_of("1f1b", 2, 2);
  const auto error = [](const auto& call) { return error_of(ErrorCode::kUsage, [&] { (void)call(); }); };
  StepProgram no_forward = schedule;
  no_forward.actions[0].erase(no_forward.actions[0].begin());
  EXPECT_NE(error([&] { return add_messages(no_forward); }).find("a computation needs what no rank computes"),
            std::string::npos);
  EXPECT_NE(error([&] { return add_state_offload(schedule); }).find("there is none"), std::string::npos);
  EXPECT_NE(error([&] { return add_activation_offload(schedule, -1); }).find("ahead from 0"), std::string::npos);
  EXPECT_NE(error([&] { return add_recompute(schedule, {true}); }).find("2 values, or none"), std::string::npos);
  EXPECT_NE(error([&] { return add_reduces(only_forwards(schedule)); }).find("nothing to reduce"), std::string::npos);
  StepProgram out_of_range = schedule;
  out_of_range.actions[0][0].chunk = 9;
  EXPECT_NE(error([&] { return add_step(out_of_range); }).find("a chunk that is not there"), std::string::npos);
}

}  // namespace
}  // namespace zeroth
