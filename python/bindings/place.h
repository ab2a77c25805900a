// The user's line of Python, found without the GIL; see _place.py.
#pragma once

#include <zeroth/comm/rank_activity.h>

#include <string>
#include <string_view>
#include <vector>

namespace zeroth::python {

struct PlaceFinder {
  int signal = 0;                      ///< makes the thread that gets it write its traceback
  int pipe = -1;                       ///< from which it is read; not blocking
  std::vector<std::string> skipped{};  ///< beginnings of file names that are not the user's
  std::string here{};                  ///< not said before file names
};

/// "train.py:57 in load_batch": of a traceback of faulthandler, most recent call first, the first line that is the
/// user's; of one without, the first. "" if it has none.
[[nodiscard]] std::string place_of(std::string_view traceback, const PlaceFinder& finder);

[[nodiscard]] RankActivity::Locator make_locator(PlaceFinder finder);

}  // namespace zeroth::python
