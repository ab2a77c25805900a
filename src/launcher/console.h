// What the whole process has once: signals, and where its output goes.
#pragma once

#include "launcher/output.h"
#include "launcher/rank_group.h"
#include "launcher/signals.h"

#include <zeroth/base/deadline.h>

#include <optional>
#include <string>
#include <string_view>

namespace zeroth::launcher {

/// `out` and `err` may be the same object.
struct Console {
  SignalInbox& inbox;
  OutputSink& out;
  OutputSink& err;

  /// A line of our own, "zeroth-run: " before it, on standard error; waits for no reader.
  void say(std::string_view text) const;
};

/// --timeout, which also counts while hosts or nodes are awaited.
struct JobTimeout {
  Milliseconds length{};
  std::optional<SteadyClock::time_point> at{};  ///< none: no such option

  /// Throws Error(kTimeout) if it is over before anything was started; `what` says at what.
  void check(const std::string& what) const;
};

/// Says that a signal came while hosts or nodes were awaited, and is that end.
[[nodiscard]] JobEnd stopped_before_the_start(int signal, const Console& console);

}  // namespace zeroth::launcher
