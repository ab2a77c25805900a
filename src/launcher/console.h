// What the whole process has once: signals, and where its output goes.
#pragma once

#include "launcher/output.h"
#include "launcher/rank_group.h"
#include "launcher/signals.h"

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

/// Says that a signal came while hosts or nodes were awaited, and is that end.
[[nodiscard]] JobEnd stopped_before_the_start(int signal, const Console& console);

}  // namespace zeroth::launcher
