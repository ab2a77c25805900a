// zeroth-run: starts the ranks of a program on this host and ends all of them when one fails.

#include "launcher/delegate.h"
#include "launcher/dry_run.h"
#include "launcher/environment.h"
#include "launcher/head.h"
#include "launcher/options.h"
#include "launcher/output.h"
#include "launcher/signals.h"
#include "launcher/site_job.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/surroundings.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace zeroth::launcher {
namespace {

/// Descriptors 0 to 2 are always open, so that none of ours lands there and is taken for a rank's stream. Returns
/// whether standard output was closed.
bool open_standard_streams() {
  bool closed_output = false;
  while (true) {
    const int fd = ::open("/dev/null", O_RDWR);
    if (fd < 0 || fd > 2) {
      ::close(fd);
      return closed_output;
    }
    closed_output = closed_output || fd == STDOUT_FILENO;
  }
}

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno != EINTR) {
      return;
    }
    text.remove_prefix(static_cast<std::size_t>(written < 0 ? 0 : written));
  }
}

bool same_file(int a, int b) {
  struct stat info_a{};
  struct stat info_b{};
  return ::fstat(a, &info_a) == 0 && ::fstat(b, &info_b) == 0 && info_a.st_dev == info_b.st_dev &&
         info_a.st_ino == info_b.st_ino;
}

int run(std::span<const char* const> arguments, bool closed_output) {
  const CommandLine command_line = parse_command_line(arguments);
  if (command_line.is_agent) {
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    SignalInbox agent_inbox;
    return run_agent_on_standard_streams(agent_inbox);
  }
  if (!command_line.options) {
    write_all(STDOUT_FILENO, command_line.text);
    return 0;
  }
  const Options& options = *command_line.options;
  if (!options.launcher.empty()) {
    return delegate(options);
  }
  if (options.dry_run) {
    write_all(STDOUT_FILENO, describe_plan(options, current_environment()));
    return 0;
  }
  take_site_variables(options);
  if (const std::string faults = variable_or_empty(kFailpointVariable); !faults.empty())
    arm_failpoints(parse_failpoints(faults), options.node);
  SignalInbox inbox;
  // Orphans of the ranks become our children, so that we can see the end of them.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  OutputSink out(STDOUT_FILENO);
  OutputSink separate_err(STDERR_FILENO);
  // One terminal or one file: one queue, which keeps the order in which lines came.
  OutputSink& err = same_file(STDOUT_FILENO, STDERR_FILENO) ? out : separate_err;
  const Console console{.inbox = inbox, .out = out, .err = err};
  if (closed_output) {
    console.say(
        "warning: standard output is closed: what the ranks write there is lost; hint: > FILE, or > /dev/null if that "
        "is wanted");
  }
  if (options.num_sites > 0 && options.site < 0) return run_sites(options, arguments, console);
  return run_job(options, console);
}

}  // namespace
}  // namespace zeroth::launcher

int main(int argc, char** argv) {
  const bool closed_output = zeroth::launcher::open_standard_streams();
  zeroth::ErrorCode code = zeroth::ErrorCode::kInternal;
  std::string text;
  try {
    const std::vector<const char*> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
    return zeroth::launcher::run(arguments, closed_output);
  } catch (const zeroth::Error& error) {
    code = error.code();
    text = error.what();
  } catch (const std::exception& error) {
    text = std::string("[INTERNAL] ") + error.what();
  }
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';  // one line, whatever the arguments held
  }
  zeroth::launcher::write_all(STDERR_FILENO, "zeroth-run: " + text + "\n");
  return zeroth::exit_code(code);
}
