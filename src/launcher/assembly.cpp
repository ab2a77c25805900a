#include "launcher/assembly.h"

#include "launcher/addresses.h"
#include "launcher/environment.h"

#include <zeroth/base/error.h>
#include <zeroth/base/surroundings.h>
#include <zeroth/base/text.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <map>
#include <set>
#include <span>
#include <utility>

namespace zeroth::launcher {
namespace {

constexpr Milliseconds kReportEvery{5000};

/// The hosts that the assembly waits for, and those that have failed.
class Waiting {
 public:
  Waiting(const std::vector<std::unique_ptr<AgentLink>>& links, Milliseconds timeout)
      : links_(&links), timeout_(timeout), deadline_(begin_ + timeout) {}

  /// Takes what has come.
  void look() {
    for (std::size_t i = 0; i < links_->size(); ++i) {
      AgentLink& link = *(*links_)[i];
      if (failed_.contains(i)) continue;
      link.look_for_exit();
      try {
        while (const auto frame = link.next()) {
          if (frame->type != FrameType::kPing && frame->type != FrameType::kNote) {
            throw Error(ErrorCode::kLaunch, "an agent spoke before it was asked");
          }
        }
        link.channel().keep_alive();
        if (link.ended()) fail(i, link.why_ended());
      } catch (const Error& error) {
        fail(i, error.what());
      }
    }
  }

  [[nodiscard]] bool over() const { return num_waiting() == 0 || SteadyClock::now() >= deadline_; }

  [[nodiscard]] std::size_t num_waiting() const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < links_->size(); ++i) count += waits_for(i) ? 1 : 0;
    return count;
  }

  /// "host h3, h4 for 5 s (2 of 4 are here)".
  [[nodiscard]] std::string describe() const {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < links_->size() && names.size() < 8; ++i) {
      if (waits_for(i)) names.push_back((*links_)[i]->host());
    }
    return fmt::format("host {}{} for {} s ({} of {} are here)", join(names, ", "),
                       names.size() < num_waiting() ? ", ..." : "", waited_s(),
                       links_->size() - failed_.size() - num_waiting(), links_->size());
  }

  /// Throws if a host has failed or is late.
  void check(const std::function<void(const RefusedHost&)>& refused) {
    std::set<std::size_t> late;
    for (std::size_t i = 0; i < links_->size(); ++i) {
      if (waits_for(i)) late.insert(i);
    }
    for (const std::size_t i : late) failed_[i] = fmt::format("no answer for {} s", waited_s());
    if (failed_.empty()) return;
    for (const auto& [index, text] : failed_) {
      if (refused) refused({.host = (*links_)[index]->host(), .text = text, .late = late.contains(index)});
    }
    std::vector<std::string> parts;
    for (const auto& [index, text] : failed_)
      parts.push_back(fmt::format("host {}: {}", (*links_)[index]->host(), text));
    throw Error(ErrorCode::kLaunch,
                fmt::format("{} of {} hosts cannot take part: {}", failed_.size(), links_->size(), join(parts, " | ")),
                {.hint = "try by hand: ssh -o BatchMode=yes -- HOST zeroth-run --version"});
  }

 private:
  [[nodiscard]] bool waits_for(std::size_t i) const { return !failed_.contains(i) && !(*links_)[i]->hello(); }
  [[nodiscard]] long long waited_s() const {
    return std::chrono::round<std::chrono::seconds>(SteadyClock::now() - begin_).count();
  }

  void fail(std::size_t i, std::string text) {
    failed_[i] = std::move(text);
    deadline_ = std::min(deadline_, SteadyClock::now() + kOthers);
  }

  const std::vector<std::unique_ptr<AgentLink>>* links_;
  Milliseconds timeout_;
  SteadyClock::time_point begin_ = SteadyClock::now();
  SteadyClock::time_point deadline_;
  std::map<std::size_t, std::string> failed_;
};

}  // namespace

bool is_this_host(const std::string& host) {
  const std::string own = host_name();
  return host == "localhost" || host == "127.0.0.1" || host == "::1" || (!own.empty() && host == own);
}

std::unique_ptr<AgentLink> start_agent(const std::string& host, const AgentProgram& program,
                                       const InheritedSignals& inherited) {
  // A scheduler that signals a session means the ranks, whom the head tells; without ssh it would lose a host instead.
  SpawnPlan plan{.environment = current_environment(),
                 .descriptors = program.descriptors,
                 .death_signal = SIGTERM,
                 .own_session = true};
  const bool here = is_this_host(host);
  if (here) {
    plan.program = "/proc/self/exe";
    plan.arguments = {"zeroth-run", "--agent"};
  } else {
    plan.program = find_program(program.ssh, search_path_of(plan.environment));
    plan.arguments = {program.ssh, "-o", "BatchMode=yes",        "-o",     "ConnectTimeout=10",
                      "--",        host, program.remote_program, "--agent"};
  }
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw Error(ErrorCode::kResource, "no pipe to an agent: " + errno_text(errno), {.which = host});
  }
  const UniqueFd read_end(ends[0]);
  UniqueFd write_end(ends[1]);
  plan.stdin_fd = read_end.get();
  return std::make_unique<AgentLink>(host, here ? "its agent" : program.ssh, std::move(write_end),
                                     spawn_rank(plan, inherited));
}

int await_agents(const std::vector<std::unique_ptr<AgentLink>>& links, Milliseconds timeout, const JobTimeout& job,
                 SignalInbox& inbox, const std::function<void(std::string_view)>& say,
                 const std::function<void(const RefusedHost&)>& refused) {
  for (const auto& link : links) {
    link->set_say([&say, host = link->host()](std::string_view line) { say(fmt::format("host {}: {}", host, line)); });
  }
  Waiting waiting(links, timeout);
  auto report_at = SteadyClock::now() + kReportEvery;
  std::vector<pollfd> polled;
  int signal = 0;
  for (waiting.look(); !waiting.over() && signal == 0; waiting.look()) {
    polled.assign(1, {.fd = inbox.fd(), .events = POLLIN, .revents = 0});
    for (const auto& link : links) link->add_polled(polled);
    ::poll(polled.data(), polled.size(), static_cast<int>(kWaitSlice.count()));
    std::size_t at = 1;
    for (const auto& link : links) at += link->handle(std::span(polled).subspan(at));
    for (const int number : inbox.take()) {
      if (number == SIGINT || number == SIGTERM || number == SIGHUP || number == SIGQUIT) signal = number;
    }
    if (waiting.num_waiting() > 0) job.check("waited for " + waiting.describe());
    if (SteadyClock::now() >= report_at && waiting.num_waiting() > 0) {
      report_at += kReportEvery;
      say("waiting for " + waiting.describe());
    }
  }
  if (signal == 0) waiting.check(refused);
  for (const auto& link : links) link->set_say([](std::string_view) {});
  return signal;
}

}  // namespace zeroth::launcher
