// A running zeroth-run in a test: collects its output, ends it in any case, and knows whether anything is
// left of it.
#pragma once

#include "support/left_behind.h"

#include <sys/resource.h>
#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::test {

/// Generous: what is promised is two seconds.
inline constexpr std::chrono::seconds kEndDeadline{5};
/// For what has no promise, on a machine that may be busy.
inline constexpr std::chrono::seconds kPatience{30};

struct JobSetup {
  bool merge = false;        ///< lines of several ranks as one, which is what users get; most tests look at every rank
  std::string stdin_text{};  ///< given through a pipe, then closed
  std::vector<std::pair<std::string, std::string>> environment{};  ///< over the test's own
  std::optional<rlim_t> descriptor_limit{};
  std::vector<int> ignored_signals{};
  bool read_output = true;                ///< false: nobody reads standard output until `start_reading`
  std::chrono::milliseconds outlived{0};  ///< by processes of the job, where zeroth-run cannot wait for them
};

struct JobResult {
  int exit_code = -1;
  int signal = 0;
  std::string out;
  std::string err;
  std::chrono::milliseconds lasted{};
};

/// Starts zeroth-run with the given arguments. The test process is a subreaper: whatever a job leaves behind
/// becomes its child and is found (and ended) there; a test fails where a process was alive when zeroth-run had ended,
/// or memory, sockets or files are left. Only one job at a time, and what a test itself puts into TMPDIR is there
/// before it.
class Job {
 public:
  explicit Job(const std::vector<std::string>& arguments, const JobSetup& setup = {});
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job();

  /// Arguments for rank_probe after "-n <ranks>" and options: probe(3, {"wait"}) or probe(3, {"wait"},
  /// {"--tee", "d"}).
  static std::vector<std::string> probe(int num_ranks, const std::vector<std::string>& arguments,
                                        const std::vector<std::string>& options = {});

  [[nodiscard]] pid_t pid() const { return pid_; }
  void signal(int number) const;
  void start_reading();
  /// Closes the reading end of standard output.
  void close_stdout();
  [[nodiscard]] std::string out() const;

  /// Waits until `count` lines "[rank] <word> <rank> <number>" have come and returns rank -> number; fails
  /// the test at the deadline.
  std::map<int, pid_t> wait_for(const std::string& word, int count);
  /// Waits for the end of zeroth-run; if it does not come in time the test fails and the job is killed.
  JobResult wait(std::chrono::milliseconds deadline = kPatience);

 private:
  void collect(int fd, std::string& text);
  void kill_everything();

  void close_outputs();

  LeftBehind left_;
  std::chrono::milliseconds outlived_;
  pid_t pid_ = -1;
  bool ended_ = false;
  std::chrono::steady_clock::time_point start_;
  int out_fd_ = -1;
  int err_fd_ = -1;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::string out_;
  std::string err_;
  std::vector<std::thread> threads_;
};

/// Whether a process exists and is not a zombie.
[[nodiscard]] bool is_alive(pid_t pid);
/// Waits until none of these is alive.
[[nodiscard]] bool all_gone_within(const std::map<int, pid_t>& pids, std::chrono::milliseconds deadline);

}  // namespace zeroth::test
