// The head's end of the connection to one agent, with the process (ssh, or the agent itself) that carries it,
// if there is one.
#pragma once

#include "base/unique_fd.h"
#include "launcher/channel.h"
#include "launcher/line_splitter.h"
#include "launcher/messages.h"
#include "launcher/rank_process.h"
#include "launcher/spawn.h"

#include <zeroth/base/error.h>

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::launcher {

/// What one host may say besides the output of its ranks.
inline constexpr int kMaxLines = 200;

/// No call blocks; destruction ends the process with SIGKILL.
class AgentLink {
 public:
  /// Over a socket whose agent has already said hello.
  AgentLink(std::string host, Channel channel, Hello hello);
  /// Over the standard streams of a process. `name`: of its program, for messages.
  AgentLink(std::string host, std::string name, UniqueFd stdin_pipe, SpawnedRank process);
  AgentLink(const AgentLink&) = delete;
  AgentLink& operator=(const AgentLink&) = delete;

  [[nodiscard]] const std::string& host() const { return host_; }
  [[nodiscard]] Channel& channel() { return channel_; }
  [[nodiscard]] const Channel& channel() const { return channel_; }
  /// Lines that the process writes to standard error, and what stood before the agent's first word, are
  /// passed on to `say`.
  void set_say(std::function<void(std::string_view)> say) { say_ = std::move(say); }
  /// A line about the host for the user; of more than kMaxLines the rest is left out, and that is said.
  void pass_on(std::string_view line);

  void add_polled(std::vector<pollfd>& polled) const;
  /// The descriptors of the last `add_polled`; returns how many those are.
  std::size_t handle(std::span<const pollfd> polled);
  /// A child of this process has ended.
  void look_for_exit();
  /// The next message; kHello is kept and not returned. Throws Error(kLaunch) for what is no message or
  /// another version's.
  [[nodiscard]] std::optional<Frame> next();
  [[nodiscard]] const std::optional<Hello>& hello() const { return hello_; }

  /// The connection has ended, and so has the process, or it does not end although it should.
  [[nodiscard]] bool ended() const;
  /// When `ended` may change without an event.
  [[nodiscard]] std::optional<SteadyClock::time_point> next_change() const { return until_; }
  /// Why the connection has ended: "ssh exited with code 255: ssh: connect to host h2 port 22: Connection
  /// refused".
  [[nodiscard]] std::string why_ended() const;
  /// Ends the process with SIGKILL and the connection.
  void kill();

 private:
  void read_stderr();
  void take_line(std::string_view line);

  std::string host_;
  std::string name_ = "its connection";
  Channel channel_;
  std::optional<RankProcess> process_;
  std::optional<ExitStatus> status_;
  UniqueFd stderr_;
  LineSplitter splitter_;
  std::string last_line_;
  int num_lines_ = 0;
  std::function<void(std::string_view)> say_ = [](std::string_view) {};
  std::optional<Hello> hello_;
  std::optional<SteadyClock::time_point> until_;
};

}  // namespace zeroth::launcher
