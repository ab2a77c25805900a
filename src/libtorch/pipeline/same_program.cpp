#include "libtorch/pipeline/same_program.h"

#include "engine/odd_rank.h"
#include "engine/texts.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace zeroth::libtorch {
namespace {

struct Difference {
  std::string which;
  std::string usual;
  std::string odd;
};

std::string chunks_text(const StepProgram& program) {
  std::string text;
  for (const int rank : program.rank_of_chunk) text += (text.empty() ? "on stages " : ", ") + std::to_string(rank);
  return text;
}

std::string late_text(const StepProgram& program) {
  std::string text;
  for (const int steps : program.late) text += (text.empty() ? "" : ", ") + std::to_string(steps);
  return text.empty() ? "not late" : text + " steps";
}

Difference difference_of(const StepProgram& usual, const StepProgram& odd) {
  if (usual.schedule != odd.schedule) return {"the schedule", usual.schedule, odd.schedule};
  if (usual.micro_batches != odd.micro_batches)
    return {"the number of micro-batches", std::to_string(usual.micro_batches), std::to_string(odd.micro_batches)};
  if (usual.rank_of_chunk != odd.rank_of_chunk) return {"the chunks", chunks_text(usual), chunks_text(odd)};
  for (std::size_t stage = 0; stage < std::min(usual.actions.size(), odd.actions.size()); ++stage) {
    const std::vector<Action>& first = usual.actions[stage];
    const std::vector<Action>& second = odd.actions[stage];
    const auto [one, other] = std::ranges::mismatch(first, second);
    if (one == first.end() && other == second.end()) continue;
    return {"action " + std::to_string(one - first.begin()) + " of stage " + std::to_string(stage),
            one == first.end() ? "no more" : to_text(*one), other == second.end() ? "no more" : to_text(*other)};
  }
  if (usual.late != odd.late) return {"how late gradients are", late_text(usual), late_text(odd)};
  return {"the program", usual.inexact ? "inexact" : "exact", odd.inexact ? "inexact" : "exact"};
}

}  // namespace

void require_same_program(const StepProgram& program, const Communicator& stages) {
  const std::string own = to_text(program);
  const auto digest = static_cast<std::int64_t>(digest64(own) >> 1U);
  std::vector<std::int64_t> digests(static_cast<std::size_t>(stages.size()));
  stages.all_gather(std::span(&digest, 1), std::span(digests));
  const OddRank found = find_odd_rank(digests);
  if (found.odd < 0) return;
  const std::vector<std::string> texts = gather_texts(own, stages);
  const Difference difference = difference_of(parse_program(texts[static_cast<std::size_t>(found.usual)]),
                                              parse_program(texts[static_cast<std::size_t>(found.odd)]));
  const auto stage = [&](int number) {
    return "stage " + std::to_string(number) + " of " + std::to_string(stages.size());
  };
  throw Error(ErrorCode::kMismatch, "stages of a pipeline have different programs",
              {.where = "libtorch.pipeline",
               .who = stage(found.odd) + " (" + stages.backend().group_name() + ")",
               .which = difference.which,
               .expected = difference.usual + " (" + stage(found.usual) + ")",
               .got = difference.odd + " (" + stage(found.odd) + ")",
               .hint = "give every stage the same configuration: schedule, chunks and gradient_accumulation_steps"});
}

}  // namespace zeroth::libtorch
