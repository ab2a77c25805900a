#include "comm/control/early_end.h"

#include <fmt/format.h>

#include <algorithm>

namespace zeroth::detail {
namespace {

bool is_in_step(Phase phase) {
  return phase == Phase::kForward || phase == Phase::kBackward || phase == Phase::kAfterBackward ||
         phase == Phase::kStep;
}

std::string end_of(const RankStatus& last) {
  if (!last.action.empty()) return "in " + last.action;
  if (last.phase == Phase::kStarting && last.step == 0) return "before its first step";
  if (last.phase == Phase::kBetweenSteps) return fmt::format("after {} step{}", last.step, last.step == 1 ? "" : "s");
  if (last.phase == Phase::kAfterBackward) return fmt::format("after a backward of step {}", last.step + 1);
  std::string text = describe_phase(last);
  if (text.starts_with("is ")) text.erase(0, 3);
  return text;
}

/// Where the rank returned, as far as it is known.
std::string last_seen(const RankStatus& last) {
  std::string text = "see where that rank returned or threw";
  if (!last.place.empty()) text += ": it was at " + last.place;
  if (!last.last_call.empty()) text += (last.place.empty() ? ": its last call " : ", its last call ") + last.last_call;
  return text;
}

}  // namespace

EarlyEnd early_end(const RankStatus& last, int waiting, const RankStatus& waits) {
  EarlyEnd end{.text = fmt::format("left early: it ended {}{}, while rank {} {}",
                                   last.end.empty() ? "" : "by " + last.end + ", ", end_of(last), waiting,
                                   describe_phase(waits)),
               .hint = last.end.empty() ? last_seen(last) : "look at the output of that rank"};
  if (!last.end.empty()) return end;  // no guess where it is known
  if (last.phase != Phase::kBetweenSteps || last.step == 0)
    return end;  // it never trained, or not to the end of a step
  if (is_in_step(waits.phase)) {
    end.text += ": unequal batch counts?";
    end.hint =
        "where ranks have unequal numbers of batches, loop over engine.batches(loader) (C++: while next_batch()) with "
        "zeroth.uneven = \"join\"; " +
        end.hint;
  } else {
    end.text += ": a call that only some ranks make?";
    end.hint =
        "evaluations, exports, averages and calls of a group are for all ranks, not under `if rank == 0`; " + end.hint;
  }
  return end;
}

}  // namespace zeroth::detail
