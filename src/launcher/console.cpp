#include "launcher/console.h"

#include <fmt/format.h>

namespace zeroth::launcher {

void Console::say(std::string_view text) const {
  err.queue() += fmt::format("zeroth-run: {}\n", text);
  err.flush_some();
}

JobEnd stopped_before_the_start(int signal, const Console& console) {
  JobEnd end{.exit_code = 128 + signal,
             .text = fmt::format("stopped by signal {}; nothing was started.", signal)};
  console.say(end.text);
  return end;
}

}  // namespace zeroth::launcher
