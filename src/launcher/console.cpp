#include "launcher/console.h"

#include <zeroth/base/error.h>

#include <fmt/format.h>

namespace zeroth::launcher {

void Console::say(std::string_view text) const {
  err.queue() += fmt::format("zeroth-run: {}\n", text);
  err.flush_some();
}

void JobTimeout::check(const std::string& what) const {
  if (!at || SteadyClock::now() < *at) return;
  throw Error(
      ErrorCode::kTimeout,
      fmt::format("the job took longer than {:g} s; nothing was started", static_cast<double>(length.count()) / 1000),
      {.where = "--timeout", .got = what, .hint = "see to that, or give more time"});
}

JobEnd stopped_before_the_start(int signal, const Console& console) {
  JobEnd end{.exit_code = 128 + signal, .text = fmt::format("stopped by signal {}; nothing was started.", signal)};
  console.say(end.text);
  return end;
}

}  // namespace zeroth::launcher
