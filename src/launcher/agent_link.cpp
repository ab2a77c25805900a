#include "launcher/agent_link.h"

#include "launcher/first_cause.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace zeroth::launcher {
namespace {

constexpr std::size_t kMaxBannerBytes = std::size_t{64} << 10;
constexpr std::size_t kMaxLine = 500;
/// Between the end of the connection and that of the process, in either order.
constexpr Milliseconds kRest{1000};

std::string tidy(std::string_view line) {
  std::string text(line.substr(0, kMaxLine));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  std::ranges::replace_if(text, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }, ' ');
  return text;
}

}  // namespace

AgentLink::AgentLink(std::string host, Channel channel, Hello hello)
    : host_(std::move(host)), channel_(std::move(channel)), splitter_({}), hello_(std::move(hello)) {}

AgentLink::AgentLink(std::string host, std::string name, UniqueFd stdin_pipe, SpawnedRank process)
    : host_(std::move(host)),
      name_(std::move(name)),
      channel_(std::move(process.out), std::move(stdin_pipe), kMaxBannerBytes),
      process_(std::move(process.process)),
      stderr_(std::move(process.err)),
      splitter_({.taker = [this](std::string_view line) { take_line(line); }}) {}

void AgentLink::add_polled(std::vector<pollfd>& polled) const {
  channel_.add_polled(polled);
  polled.push_back({.fd = stderr_.get(), .events = POLLIN, .revents = 0});
}

std::size_t AgentLink::handle(std::span<const pollfd> polled) {
  channel_.handle(polled[0], polled[1]);
  if (polled[2].revents != 0) read_stderr();
  if (channel_.ended() && !until_) until_ = SteadyClock::now() + kRest;
  return 3;
}

void AgentLink::read_stderr() {
  std::array<char, 4096> block;
  const ssize_t bytes = stderr_.valid() ? ::read(stderr_.get(), block.data(), block.size()) : 0;
  std::string unused;
  if (bytes > 0) {
    splitter_.feed(std::string_view(block.data(), static_cast<std::size_t>(bytes)), unused);
  } else if (bytes == 0 || (errno != EAGAIN && errno != EINTR)) {
    splitter_.finish(unused);
    stderr_.reset();
  }
}

void AgentLink::take_line(std::string_view line) {
  const std::string text = tidy(line);
  if (text.empty()) return;
  last_line_ = text;
  pass_on(text);
}

void AgentLink::pass_on(std::string_view line) {
  if (++num_lines_ <= kMaxLines) say_(line);
  if (num_lines_ == kMaxLines) say_("(what else it says is left out)");
}

void AgentLink::look_for_exit() {
  if (!process_ || status_) return;
  status_ = process_->exit_status();
  if (!status_) return;
  for (int blocks = 0; stderr_.valid() && blocks < 16; ++blocks) read_stderr();
  if (!until_) until_ = SteadyClock::now() + kRest;
}

std::optional<Frame> AgentLink::next() {
  const bool first = !hello_;
  std::optional<Frame> frame = channel_.next();
  if (!frame || frame->type != FrameType::kHello) {
    return frame;
  }
  if (!first) throw Error(ErrorCode::kLaunch, "a second hello of one agent", {.where = "zeroth-run between hosts"});
  hello_ = decode_hello(frame->payload);
  if (hello_->version != ZEROTH_VERSION_TEXT) {
    throw Error(ErrorCode::kLaunch, "another version of zeroth-run is on that host",
                {.expected = ZEROTH_VERSION_TEXT,
                 .got = hello_->version,
                 .hint = "install one version on all hosts, or name it with --remote-program"});
  }
  return channel_.next();
}

bool AgentLink::ended() const {
  if (channel_.ended() && (!process_ || status_)) return true;
  return until_ && SteadyClock::now() >= *until_;
}

std::string AgentLink::why_ended() const {
  std::string text = name_ + " was closed";
  if (status_ && status_->signal != 0) {
    text = fmt::format("{} was killed by signal {} ({})", name_, status_->signal, signal_name(status_->signal));
  } else if (status_) {
    text = fmt::format("{} exited with code {}", name_, status_->exit_code);
  }
  return last_line_.empty() ? text : text + ": " + last_line_;
}

void AgentLink::kill() {
  if (process_) {
    process_->signal_group(SIGKILL);
    process_->end_group();
    status_ = status_.value_or(ExitStatus{.signal = SIGKILL});
  }
  channel_.close();
}

}  // namespace zeroth::launcher
