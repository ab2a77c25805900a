#include "support/fork_ranks.h"

#include "support/left_behind.h"

#include <zeroth/base/surroundings.h>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <optional>
#include <thread>

namespace zeroth::test {
namespace {

struct Child {
  pid_t pid = 0;
  int pipe = -1;
  std::string text{};
  bool running = true;
  std::optional<Milliseconds> ended{};  ///< since the start; collected later
};

constexpr Milliseconds kMourning{200};

bool has_ended(pid_t pid) {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
}

[[noreturn]] void run_child(int rank, int pipe, pid_t parent, const std::function<void(int)>& body) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(2);
  std::string text;
  try {
    body(rank);
  } catch (const Error& error) {
    text = std::string(1, static_cast<char>('A' + static_cast<int>(error.code()))) + error.what();
  } catch (const std::exception& error) {
    text = std::string("-") + error.what();
  }
  if (text.empty()) ::_exit(0);
  for (std::string_view rest = text; !rest.empty();) {
    const ssize_t written = ::write(pipe, rest.data(), rest.size());
    if (written <= 0) break;
    rest.remove_prefix(static_cast<std::size_t>(written));
  }
  ::_exit(1);
}

void drain(Child& child) {
  std::array<char, 4096> buffer{};
  for (;;) {
    const ssize_t got = ::read(child.pipe, buffer.data(), buffer.size());
    if (got <= 0) return;
    child.text.append(buffer.data(), static_cast<std::size_t>(got));
  }
}

}  // namespace

ForkReport fork_ranks(int world, const std::function<void(int rank)>& body, const ForkRanksOptions& options) {
  const auto start = SteadyClock::now();
  const auto since = [start] { return std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - start); };
  const pid_t parent = ::getpid();
  const LeftBehind left;
  std::vector<Child> children;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < world; ++rank) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) throw std::runtime_error("pipe2 failed");
    const pid_t pid = ::fork();
    if (pid < 0) throw std::runtime_error("fork failed");
    if (pid == 0) {
      ::fcntl(ends[1], F_SETFL, 0);
      for (const Child& sibling : children) ::close(sibling.pipe);
      run_child(rank, ends[1], parent, body);
    }
    ::close(ends[1]);
    children.push_back({.pid = pid, .pipe = ends[0]});
    pids.push_back(pid);
  }
  ForkReport report;
  report.ends.resize(static_cast<std::size_t>(world));
  bool meanwhile = static_cast<bool>(options.meanwhile);
  bool killed = false;
  for (int running = world; running > 0;) {
    if (meanwhile) meanwhile = options.meanwhile(pids, since());
    if (!killed && since() > options.deadline) {
      killed = true;
      for (std::size_t rank = 0; rank < children.size(); ++rank) {
        if (!children[rank].running) continue;
        report.ends[rank].killed_at_deadline = true;
        ::kill(children[rank].pid, SIGKILL);
      }
    }
    for (std::size_t rank = 0; rank < children.size(); ++rank) {
      Child& child = children[rank];
      if (!child.running) continue;
      drain(child);
      if (!child.ended && has_ended(child.pid)) child.ended = since();
      if (!child.ended) continue;
      // How it ended can be read until it is collected: the others shall have seen it.
      const bool seen = std::ranges::all_of(children, [](const Child& other) { return !other.running || other.ended; });
      if (!seen && since() - *child.ended < kMourning) continue;
      int status = 0;
      if (::waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
      child.running = false;
      --running;
      ProcessEnd& end = report.ends[rank];
      end.rank = static_cast<int>(rank);
      end.pid = child.pid;
      end.wait_status = status;
      end.after = *child.ended;
      drain(child);
      ::close(child.pipe);
      RankFailure failure{.rank = static_cast<int>(rank), .text = {}, .code = {}};
      if (end.killed_at_deadline) {
        failure.text = "still ran at the deadline";
      } else if (WIFSIGNALED(status)) {
        failure.text = "killed by signal " + std::to_string(WTERMSIG(status));
      } else if (WEXITSTATUS(status) != 0) {
        failure.text = child.text.empty() ? "exit code " + std::to_string(WEXITSTATUS(status)) : child.text.substr(1);
        if (!child.text.empty() && child.text.front() != '-') {
          failure.code = static_cast<ErrorCode>(child.text.front() - 'A');
        }
      } else {
        continue;
      }
      report.failures.push_back(std::move(failure));
    }
    std::this_thread::sleep_for(Milliseconds{2});
  }
  for (const ProcessEnd& end : report.ends) report.ended.push_back(end.after);
  std::ranges::sort(report.failures, {}, &RankFailure::rank);
  if (const std::string text = left.text(); !text.empty())
    ADD_FAILURE() << "the ranks have left\n" << text << report.text();
  return report;
}

std::string unique_job() {
  std::uint64_t bits = 0;
  std::ifstream("/dev/urandom", std::ios::binary).read(reinterpret_cast<char*>(&bits), sizeof bits);
  return "test-" + std::to_string(::getpid()) + "-" + std::to_string(bits);
}

int open_descriptors() {
  return static_cast<int>(count_open_files());
}

}  // namespace zeroth::test
