// Programs that are broken by hand: the verifier names the ranks and actions in conflict.
#include "support/error_of.h"

#include <zeroth/program/passes.h>
#include <zeroth/program/schedules.h>
#include <zeroth/program/verify.h>

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

struct Edit {
  int rank;
  std::string from;
  std::string to;
};

/// The program with words of a rank's line replaced, each at its first place.
StepProgram edited(const StepProgram& program, const std::vector<Edit>& edits) {
  std::vector<std::string> lines;
  std::string text = to_text(program);
  for (std::size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n')) {
    lines.push_back(text.substr(0, end) + " ");
    text.erase(0, end + 1);
  }
  for (const auto& [rank, from, to] : edits) {
    std::string& line = lines[static_cast<std::size_t>(rank) + 1];
    const std::size_t place = line.find(" " + from + " ");
    EXPECT_NE(place, std::string::npos) << from << " in " << line;
    if (place != std::string::npos) line.replace(place, from.size() + 2, " " + to + " ");
  }
  for (const std::string& line : lines) text += line + "\n";
  return parse_program(text);
}

struct Broken {
  std::string name;
  StepProgram program;
  std::vector<std::pair<int, std::string>> places;  ///< rank and action; "" is the end of its list
  std::string what;
  VerifyOptions options{};
};

StepProgram made(const std::string& name, int ranks, int micro_batches, const LowerOptions& options = {}) {
  return lower(make_schedule(name, {.ranks = ranks, .micro_batches = micro_batches}), options);
}

std::vector<Broken> broken_orders() {
  const StepProgram two = made("1f1b", 2, 2);  // 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
  const StepProgram zb = made("zb-h1", 2, 2);
  return {
      {"a backward before its forward",
       edited(two, {{0, "0F0", "0B0"}, {0, "0B0 0RECV_B1", "0F0 0RECV_B1"}}),
       {{0, "0B0"}, {0, "0F0"}},
       "a backward comes before its forward"},
      {"W before I",
       edited(zb, {{1, "1I0", "1W0"}, {1, "1F1 1I1 1SEND_B1 1W0", "1F1 1I1 1SEND_B1 1I0"}}),
       {{1, "1W0"}, {1, "1I0"}},
       "a W comes before its I"},
      {"a forward twice", edited(two, {{1, "1F1", "1F0"}}), {{1, ""}}, "a chunk never computes a micro-batch"},
      {"a forward more", edited(two, {{1, "1F1", "1F1 1F1"}}), {{1, "1F1"}, {1, "1F1"}}, "stands there twice"},
      {"no backward", edited(two, {{0, "0B1", ""}}), {{0, "0F1"}, {0, ""}}, "a forward has no backward"},
      {"I without W", edited(zb, {{0, "0W1", ""}}), {{0, "0I1"}, {0, ""}}, "an I has no W"},
      {"B and W", edited(zb, {{0, "0I1", "0B1"}}), {{0, "0B1"}, {0, "0W1"}}, "a gradient twice"},
      {"B and I", edited(two, {{0, "0B1", "0B1 0I1"}}), {{0, "0B1"}, {0, "0I1"}}, "a gradient twice"},
      {"a chunk of another rank", edited(two, {{0, "0F1", "1F1"}}), {{0, "1F1"}}, "does not have its chunk"},
      {"a chunk that is not there", edited(two, {{0, "0F1", "7F1"}}), {{0, "7F1"}}, "a chunk that is not there"},
      {"a micro-batch that is not there",
       edited(two, {{0, "0F1", "0F2"}}),
       {{0, "0F2"}},
       "a micro-batch that is not there"},
      {"use before the receive",
       edited(two, {{1, "1RECV_F0 1F0", "1F0 1RECV_F0"}}),
       {{1, "1F0"}, {1, "1RECV_F0"}},
       "before the receive of what it needs"},
      {"send before the computation",
       edited(two, {{0, "0F1 0SEND_F1", "0SEND_F1 0F1"}}),
       {{0, "0SEND_F1"}, {0, "0F1"}},
       "sends what it has not computed"},
      {"two chunks of a rank in the wrong order",
       edited(made("zb-v", 1, 1), {{0, "0F0 1F0", "1F0 0F0"}}),
       {{0, "1F0"}, {0, "0F0"}},
       "before what it needs"},
  };
}

std::vector<Broken> broken_messages() {
  const StepProgram two = made("1f1b", 2, 2);
  const StepProgram three = made("1f1b", 3, 3);
  return {
      {"no send", edited(two, {{0, "0SEND_F1", ""}}), {{1, "1RECV_F1"}, {0, ""}}, "receives what is never sent"},
      {"no receive", edited(two, {{0, "0RECV_B1", ""}}), {{0, "0B1"}, {1, "1B1"}}, "needs what is never received"},
      {"a receive for nothing",
       edited(made("1f1b", 2, 2), {{0, "0RECV_B1 0B1", "0B1 0RECV_B1"}}),
       {{0, "0B1"}, {0, "0RECV_B1"}},
       "before the receive"},
      {"sends in another order",
       edited(two, {{0, "0SEND_F0", ""}, {0, "0SEND_F1", "0SEND_F1 0SEND_F0"}}),
       {{0, "0SEND_F1"}, {1, "1RECV_F0"}},
       "in another order than they are sent"},
      {"receives in another order",
       edited(two, {{1, "1RECV_F0", "1RECV_F1 1RECV_F0"}, {1, "1SEND_B0 1RECV_F1", "1SEND_B0"}}),
       {{0, "0SEND_F0"}, {1, "1RECV_F1"}},
       "in another order than they are sent"},
      {"beyond the last chunk", edited(two, {{1, "1F0", "1F0 1SEND_F0"}}), {{1, "1SEND_F0"}}, "beyond"},
      {"to itself", edited(made("zb-v", 2, 2), {{1, "1F0", "1F0 1SEND_F0"}}), {{1, "1SEND_F0"}}, "to itself"},
      {"both wait",
       edited(two, {{0, "0SEND_F1 0RECV_B0 0B0 0RECV_B1", "0RECV_B0 0B0 0RECV_B1 0SEND_F1"}}),
       {{0, "0RECV_B1"}, {1, "1RECV_F1"}},
       "rank 0 waits for rank 1, which waits for rank 0"},
      {"both wait at once",
       edited(two, {{0, "0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0", "0RECV_B0 0SEND_F0 0F1 0SEND_F1 0B0"}}),
       {{0, "0RECV_B0"}, {1, "1RECV_F0"}},
       "rank 0 waits for rank 1, which waits for rank 0"},
      {"rank 1 keeps what rank 2 needs",
       edited(three, {{1, "1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0",
                       "1F0 1RECV_F1 1F1 1RECV_B0 1SEND_F0 1SEND_F1 1B0"}}),
       {{1, "1RECV_B0"}, {2, "2RECV_F0"}},
       "rank 1 waits for rank 2, which waits for rank 1"},
      {"three wait in a circle",
       parse_program("zeroth-program 1 schedule=ring ranks=3 micro_batches=1 chunks=0,1,2,0\n"
                     "0: 0F0 3RECV_F0 0SEND_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0\n"
                     "1: 1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0\n"
                     "2: 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0\n"),
       {{0, "3RECV_F0"}, {2, "2RECV_F0"}},
       "rank 0 waits for rank 2, which waits for rank 1, which waits for rank 0"},
      {"a dependence against the order",
       made("gpipe", 2, 2),
       {{0, "0F1"}, {1, "1RECV_F1"}},
       "rank 0 waits for rank 1, which waits for rank 0",
       {.dependences = {{.first = parse_action("1B0"), .then = parse_action("0F1")}}}},
  };
}

std::vector<Broken> broken_states() {
  const StepProgram two = made("1f1b", 2, 2);
  const StepProgram kept = made("1f1b", 2, 2, {.gathers = Gathers::kKept});
  const StepProgram offloaded = made("1f1b", 2, 4, {.offload_activations = true, .offload_states = true});
  const StepProgram vocabulary = made("1f1b", 2, 2, {.vocabulary = Vocabulary::kTwoBarriers});
  StepProgram other_order = vocabulary;
  for (Action& action : other_order.actions[0]) {
    if (is_vocabulary(action.kind)) action.micro_batch = 1 - action.micro_batch;
  }
  return {
      {"reduced too early",
       edited(two, {{0, "0B1 0REDUCE", "0REDUCE 0B1"}}),
       {{0, "0B1"}, {0, "0REDUCE"}},
       "reduced before the last of them"},
      {"reduced twice",
       edited(two, {{0, "0REDUCE", "0REDUCE 0REDUCE"}}),
       {{0, "0REDUCE"}, {0, "0REDUCE"}},
       "reduced twice"},
      {"not reduced", edited(two, {{0, "0REDUCE", ""}}), {{0, "STEP"}, {0, "0B1"}}, "not reduced before the step"},
      {"no step", edited(two, {{1, "STEP", ""}}), {{1, ""}}, "does not step"},
      {"work after the step",
       edited(two, {{1, "1B1 1SEND_B1 1REDUCE STEP", "1REDUCE STEP 1B1 1SEND_B1"}}),
       {{1, "1B1"}, {1, "STEP"}},
       "after the step"},
      {"not gathered",
       edited(kept, {{0, "0UNSHARD 0F0 0SEND_F0", "0F0 0SEND_F0 0UNSHARD"}}),
       {{0, "0F0"}},
       "without its parameters"},
      {"given back too early",
       edited(kept, {{0, "0B1 0RESHARD", "0RESHARD 0B1"}}),
       {{0, "0B1"}, {0, "0RESHARD"}},
       "without its parameters"},
      {"gathered twice",
       edited(kept, {{0, "0F1", "0UNSHARD 0F1"}}),
       {{0, "0UNSHARD"}, {0, "0UNSHARD"}},
       "gathered that is whole"},
      {"never given back", edited(kept, {{0, "0RESHARD", ""}}), {{0, "0UNSHARD"}}, "never given back"},
      {"given back twice",
       edited(kept, {{0, "0RESHARD", "0RESHARD 0RESHARD"}}),
       {{0, "0RESHARD"}, {0, "0RESHARD"}},
       "given back that is not whole"},
      {"fetched too late",
       edited(offloaded, {{0, "0FETCH0 0RECV_B0 0B0", "0RECV_B0 0B0 0FETCH0"}}),
       {{0, "0B0"}, {0, "0FETCH0"}},
       "used before they are fetched"},
      {"never fetched", edited(offloaded, {{0, "0FETCH0", ""}}), {{0, "0FLUSH0"}, {0, "0B0"}}, "a FLUSH has no FETCH"},
      {"steps without the states",
       edited(offloaded, {{0, "0FETCH STEP", "STEP"}}),
       {{0, "STEP"}},
       "without the states"},
      {"states stay", edited(offloaded, {{0, "0FLUSH", ""}}), {{0, "0FETCH"}}, "never moved away"},
      {"too many activations", two, {{0, "0F1"}}, "too many micro-batches", {.in_flight = {1, 1}}},
      {"collectives in another order", other_order, {{0, "V_INPUT1"}, {1, "V_INPUT0"}}, "in another order"},
      {"a backward before the output layer",
       edited(vocabulary, {{1, "V_GRAD1 1B0 1SEND_B0 1B1", "1B1 V_GRAD1 1B0 1SEND_B0"}}),
       {{1, "1B1"}, {1, "V_GRAD1"}},
       "before the output layer"},
      {"the output layer before its input",
       edited(vocabulary, {{1, "1F0 V_INPUT0", "V_INPUT0 1F0"}}),
       {{1, "V_INPUT0"}, {1, "1F0"}},
       "before its input"},
      {"a rank without the output layer",
       edited(vocabulary, {{0, "V_SUM0", ""}}),
       {},
       "a split output layer is not whole"},
      {"parts in another order",
       edited(vocabulary, {{0, "V_S0 V_SUM0", "V_SUM0 V_S0"}}),
       {{0, "V_SUM0"}, {0, "V_S0"}},
       "in another order"},
  };
}

void expect_refuted(const Broken& broken) {
  const auto refutation = refute(broken.program, broken.options);
  ASSERT_TRUE(refutation.has_value()) << broken.name;
  std::vector<std::pair<int, std::string>> places;
  for (const Refutation::Place& place : refutation->places) {
    places.emplace_back(place.rank, place.action);
    // The place is where the action stands.
    const std::vector<Action>& actions = broken.program.actions[static_cast<std::size_t>(place.rank)];
    if (place.action.empty()) {
      EXPECT_EQ(place.index, static_cast<int>(actions.size())) << broken.name;
    } else {
      ASSERT_LT(place.index, static_cast<int>(actions.size())) << broken.name;
      EXPECT_EQ(to_text(actions[static_cast<std::size_t>(place.index)]), place.action) << broken.name;
    }
  }
  EXPECT_EQ(places, broken.places) << broken.name << ": " << refutation->what;
  EXPECT_NE(refutation->what.find(broken.what), std::string::npos) << broken.name << ": " << refutation->what;
}

TEST(ProgramBroken, OrdersAreRefutedWithTheirActions) {
  for (const Broken& broken : broken_orders()) expect_refuted(broken);
}

TEST(ProgramBroken, MessagesAreRefutedWithBothRanks) {
  for (const Broken& broken : broken_messages()) expect_refuted(broken);
}

TEST(ProgramBroken, StatesAreRefutedWithTheirActions) {
  for (const Broken& broken : broken_states()) expect_refuted(broken);
}

TEST(ProgramBroken, ErrorsShowBothRanksWithNeighbours) {
  const StepProgram program =
      edited(made("1f1b", 2, 2), {{0, "0SEND_F1 0RECV_B0 0B0 0RECV_B1", "0RECV_B0 0B0 0RECV_B1 0SEND_F1"}});
  EXPECT_EQ(
      test::error_of(ErrorCode::kUsage, [&] { verify(program); }),
      "[USAGE] ranks wait for each other: rank 0 waits for rank 1, which waits for rank 0; where: program.verify; "
      "who: rank 0 at 0RECV_B1, rank 1 at 1RECV_F1; which: 1f1b; expected: 1SEND_B1 on rank 1 before it waits; "
      "got: rank 0: ... 0RECV_B0 0B0 [0RECV_B1] 0SEND_F1 0B1 ...; "
      "rank 1: ... 1B0 1SEND_B0 [1RECV_F1] 1F1 1B1 ...");
}

TEST(ProgramBroken, ShapesAreRefutedBeforeAnythingIsAllocated) {
  StepProgram program = made("1f1b", 2, 2);
  program.micro_batches = 1 << 30;
  EXPECT_NE(test::error_of(ErrorCode::kUsage, [&] { verify(program); }).find("never computes"), std::string::npos);
  program = made("1f1b", 2, 2);
  program.rank_of_chunk[1] = 7;
  EXPECT_NE(test::error_of(ErrorCode::kUsage, [&] { verify(program); }).find("a rank that is not there: 7"),
            std::string::npos);
  program = made("1f1b", 2, 2);
  program.schedule = "two words";
  EXPECT_NE(test::error_of(ErrorCode::kUsage, [&] { verify(program); }).find("has blanks or control characters"),
            std::string::npos);
  EXPECT_NE(test::error_of(ErrorCode::kUsage, [] { verify({}); }).find("needs ranks"), std::string::npos);
  EXPECT_NE(
      test::error_of(ErrorCode::kUsage, [] { verify(made("1f1b", 2, 2), {.in_flight = {1}}); }).find("one a rank"),
      std::string::npos);
}

}  // namespace
}  // namespace zeroth
