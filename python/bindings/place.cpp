#include "place.h"

#include <zeroth/base/deadline.h>

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace zeroth::python {
namespace {

constexpr Milliseconds kPatience{500};
constexpr Milliseconds kQuiet{20};  // a traceback comes in many small writes
constexpr std::size_t kMostBytes = std::size_t{256} << 10U;

struct Frame {
  std::string_view file;
  std::string_view line;
  std::string_view function;
};

/// `  File "train.py", line 57 in load_batch`
std::optional<Frame> frame_of(std::string_view text) {
  constexpr std::string_view kFile = "  File \"";
  constexpr std::string_view kLine = "\", line ";
  constexpr std::string_view kIn = " in ";
  if (!text.starts_with(kFile)) return std::nullopt;
  text.remove_prefix(kFile.size());
  const std::size_t line = text.rfind(kLine);
  if (line == std::string_view::npos) return std::nullopt;
  const std::string_view rest = text.substr(line + kLine.size());
  const std::size_t in = rest.find(kIn);
  if (in == std::string_view::npos) return std::nullopt;
  return Frame{text.substr(0, line), rest.substr(0, in), rest.substr(in + kIn.size())};
}

std::string read_some(int pipe, Milliseconds patience, Milliseconds quiet) {
  std::string text;
  const Deadline deadline(patience);
  pollfd watched{.fd = pipe, .events = POLLIN, .revents = 0};
  while (text.size() < kMostBytes && !deadline.passed()) {
    const Milliseconds pause = text.empty() ? deadline.remaining() : std::min(quiet, deadline.remaining());
    if (::poll(&watched, 1, static_cast<int>(pause.count())) <= 0) break;
    char bytes[4096];
    const ssize_t got = ::read(pipe, bytes, sizeof bytes);
    if (got <= 0) break;
    text.append(bytes, static_cast<std::size_t>(got));
  }
  return text;
}

}  // namespace

std::string place_of(std::string_view traceback, const PlaceFinder& finder) {
  std::optional<Frame> first;
  std::optional<Frame> users;
  while (!traceback.empty() && !users) {
    const std::size_t end = traceback.find('\n');
    const std::optional<Frame> frame = frame_of(traceback.substr(0, end));
    traceback.remove_prefix(end == std::string_view::npos ? traceback.size() : end + 1);
    if (!frame) continue;
    if (!first) first = frame;
    if (std::ranges::none_of(finder.skipped,
                             [&](const std::string& prefix) { return frame->file.starts_with(prefix); }))
      users = frame;
  }
  if (!users) users = first;
  if (!users) return "";
  std::string_view file = users->file;
  if (file.starts_with(finder.here)) file.remove_prefix(finder.here.size());
  return std::string(file) + ":" + std::string(users->line) + " in " + std::string(users->function);
}

RankActivity::Locator make_locator(PlaceFinder finder) {
  return [finder = std::move(finder)](pid_t thread) -> std::string {
    (void)read_some(finder.pipe, Milliseconds{1}, Milliseconds{0});  // what came too late for the question before
    if (::syscall(SYS_tgkill, ::getpid(), thread, finder.signal) != 0) return "";
    return place_of(read_some(finder.pipe, kPatience, kQuiet), finder);
  };
}

}  // namespace zeroth::python
