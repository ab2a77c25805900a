// Programs that are changed at random: what the verifier lets pass, an executor that shares nothing with it runs.
#include "oracle.h"

#include <zeroth/program/passes.h>
#include <zeroth/program/schedules.h>
#include <zeroth/program/verify.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace zeroth {
namespace {

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  StepProgram program() {
    const std::vector<std::string> names = schedule_names();
    LowerOptions options{.gathers = static_cast<Gathers>(below(3)), .step = below(3) > 0};
    options.recompute = below(4) == 0;
    options.offload_activations = below(4) == 0;
    return lower(make_schedule(names[static_cast<std::size_t>(below(static_cast<int>(names.size())))],
                               {.ranks = 1 + below(4), .micro_batches = 1 + below(5)}),
                 options);
  }

  /// One change, of any of these kinds; it may change nothing.
  void mutate(StepProgram& program) {
    std::vector<Action>& actions = pick(program.actions);
    if (actions.empty()) return;
    const auto place = actions.begin() + below(static_cast<int>(actions.size()));
    switch (below(9)) {
      case 0:
        std::iter_swap(place, place + 1 < actions.end() ? place + 1 : place);
        break;
      case 1:
        std::swap(*place, pick(actions));
        break;
      case 2:
        actions.erase(place);
        break;
      case 3: {
        const Action action = *place;
        actions.insert(actions.begin() + below(static_cast<int>(actions.size()) + 1), action);
        break;
      }
      case 4: {
        const Action action = *place;
        actions.erase(place);
        actions.insert(actions.begin() + below(static_cast<int>(actions.size()) + 1), action);
        break;
      }
      case 5:
        if (place->micro_batch >= 0) place->micro_batch = below(program.micro_batches);
        break;
      case 6:
        if (place->chunk >= 0) place->chunk = below(program.chunks());
        break;
      case 7: {
        const Action changed{.kind = static_cast<ActionKind>(below(static_cast<int>(ActionKind::kRecompute) + 1)),
                             .chunk = place->chunk,
                             .micro_batch = place->micro_batch};
        *place = changed;
        break;
      }
      default:
        pick(program.actions).push_back(*place);
        break;
    }
  }

 private:
  int below(int bound) { return std::uniform_int_distribution(0, bound - 1)(random_); }
  template <class List>
  typename List::reference pick(List& list) {
    return list[static_cast<std::size_t>(below(static_cast<int>(list.size())))];
  }
  std::mt19937 random_;
};

/// Both judge alike; returns how many were refuted.
int judge_mutations(unsigned seed, int count) {
  Mutator mutator(seed);
  int refuted = 0;
  for (int i = 0; i < count; ++i) {
    StepProgram program = mutator.program();
    const std::string before = to_text(program);
    for (int changes = 1 + i % 3; changes > 0; --changes) mutator.mutate(program);
    const auto refutation = refute(program);
    const std::string fault = test::run_by_queues(program);
    EXPECT_EQ(refutation.has_value(), !fault.empty())
        << "seed " << seed << ", number " << i << ": the verifier says \"" << (refutation ? refutation->what : "")
        << "\", the executor \"" << fault << "\"\n"
        << before << to_text(program);
    if (refutation.has_value() == fault.empty()) return refuted;
    refuted += refutation.has_value();
  }
  return refuted;
}

TEST(ProgramMutations, AreRefutedOrRunWell) {
  const int refuted = judge_mutations(1, 10'000);
  EXPECT_GT(refuted, 7000);
  EXPECT_LT(refuted, 9900);  // some change nothing that matters
}

TEST(LongProgramMutations, AreRefutedOrRunWell) {
  for (unsigned seed = 100; seed < 130; ++seed) judge_mutations(seed, 10'000);
}

}  // namespace
}  // namespace zeroth
