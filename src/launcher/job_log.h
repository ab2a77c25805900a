// --json FILE: what happens to a job, one JSON object a line, for programs.
#pragma once

#include "base/unique_fd.h"
#include "launcher/first_cause.h"
#include "launcher/host_task.h"
#include "launcher/rank_group.h"

#include <string>
#include <vector>

namespace zeroth::launcher {

/// Every line has "event", "time" (seconds since 1970) and "restart" (starts before this one). Without a file
/// nothing is written. A file that cannot be written any more ends no job: `failed` says so once.
class JobLog {
 public:
  JobLog() = default;
  /// Empties the file, or makes it. Throws Error(kIo).
  explicit JobLog(const std::string& path);

  void set_restart(int restart) { restart_ = restart; }
  /// "start": num_ranks, command, hosts.
  void start(int num_ranks, const std::vector<std::string>& command, const std::vector<std::string>& hosts);
  /// "host_refused": host, text, late.
  void host_refused(const std::string& host, const std::string& text, bool late);
  /// "rank_end": rank, host, pid, and exit_code or signal.
  void rank_end(int rank, const std::string& host, pid_t pid, const ExitStatus& status);
  /// "first_cause": rank, host, pid, and exit_code or signal; text.
  void first_cause(const FailureRecord& cause, const std::string& text);
  /// "end": exit_code, preempted, will_restart, text.
  void end(const JobEnd& end);
  /// Why it is incomplete, "" if it is not; once.
  [[nodiscard]] std::string take_failure() { return std::exchange(failure_, {}); }

 private:
  template <typename Object>
  void write(const char* event, Object object);

  std::string path_;
  UniqueFd file_;
  int restart_ = 0;
  std::string failure_;
};

}  // namespace zeroth::launcher
