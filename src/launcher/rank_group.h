// The ranks of one host as their job sees them, whether they are children of this process or of an agent
// elsewhere.
#pragma once

#include "launcher/rank_process.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/ended_ranks.h>
#include <zeroth/base/error.h>

#include <poll.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::launcher {

using TimePoint = SteadyClock::time_point;

enum class Stream { kOut, kErr };

/// A rank that has ended gets this long until its pipes are at their end (children of its own may still
/// write).
inline constexpr Milliseconds kLinger{500};
/// From SIGTERM to SIGKILL.
inline constexpr Milliseconds kTerminateGrace{1300};
/// A process that SIGKILL does not end within this time is stuck in the kernel; nobody waits for it any
/// longer.
inline constexpr Milliseconds kStuck{5000};

/// How a job ended, for those who took part.
struct JobEnd {
  int exit_code = 0;
  bool restart = false;  ///< it will be started once more
  std::string text{};    ///< why it ended; "" if well
};

/// Hears what happens in a group, inside of that group's calls. Ranks are numbered as in the job.
class GroupListener {
 public:
  virtual void rank_output(int rank, Stream stream, std::string_view bytes) = 0;
  virtual void rank_output_ended(int rank, Stream stream) = 0;
  /// All that it wrote until its end has been told. `host` "": this one.
  virtual void rank_ended(int rank, const std::string& host, pid_t pid, const ExitStatus& status) = 0;
  /// No rank of the group is under control any more, or none could be started; once at most, and nothing
  /// comes after it.
  virtual void host_failed(const std::string& host, int first_rank, int num_ranks, const Error& error) = 0;
  /// Something that a user should know, one line. `host` "": this one.
  virtual void host_note(const std::string& host, std::string_view text) = 0;
  /// So much waits to be written that output should not be read for now.
  [[nodiscard]] virtual bool congested(Stream stream) const = 0;

 protected:
  ~GroupListener() = default;
};

/// No call blocks. Destruction ends what is left.
class RankGroup {
 public:
  RankGroup() = default;
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;
  virtual ~RankGroup() = default;

  /// Appends the descriptors to wait for.
  virtual void add_polled(std::vector<pollfd>& polled) const = 0;
  /// Those of the last `add_polled`, after poll.
  virtual void handle(std::span<const pollfd> polled) = 0;
  /// A child of this process has ended.
  virtual void look_for_exits() = 0;
  /// Does what is due.
  virtual void settle() = 0;
  /// When `settle` is due next; none if only events matter.
  [[nodiscard]] virtual std::optional<TimePoint> next() const = 0;
  /// To every process of every rank.
  virtual void signal_groups(int signal) = 0;
  /// To the ranks only, not to their children.
  virtual void signal_ranks(int signal) = 0;
  /// A rank of the job, of this group or another one, has ended well; those that have yet to meet it hear of it.
  virtual void other_rank_ended(const EndedRank& rank) = 0;
  /// Lets go of ranks that not even SIGKILL has ended; says which.
  virtual std::vector<std::string> abandon() = 0;

  /// A host that has said nothing for a while may be the cause of a failure elsewhere; until then it has
  /// spoken or is lost.
  [[nodiscard]] virtual std::optional<TimePoint> in_doubt_until() const { return std::nullopt; }
  /// The job is over: after the last rank of the last group.
  virtual void end_job(const JobEnd& /*end*/) {}

  [[nodiscard]] virtual int num_running() const = 0;
  /// Every rank, and every process of its group, has ended.
  [[nodiscard]] virtual bool gone() const = 0;
  /// After `end_job`: nothing is left to wait for.
  [[nodiscard]] virtual bool closed() const { return gone(); }
};

}  // namespace zeroth::launcher
