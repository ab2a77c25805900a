// What is said of a rank that has left in order while others wait for it: by what it and one of them have done.
#pragma once

#include <zeroth/comm/rank_activity.h>

#include <string>

namespace zeroth::detail {

struct EarlyEnd {
  std::string text{};  ///< "left early: it ended after 3 steps, while rank 0 is in the forward of unit root of step 4:
                       ///< unequal batch counts?"
  std::string hint{};
};

/// `last`: how the rank that left was; `waiting`: one that waits for it, and how that is.
[[nodiscard]] EarlyEnd early_end(const RankStatus& last, int waiting, const RankStatus& waits);

}  // namespace zeroth::detail
