// Peers: the ranks of a job as one rank sees them. Doorbells, liveness and abort; shared by all groups of the
// rank.
#pragma once

#include "comm/control/watched.h"
#include "comm/function_ref.h"
#include "comm/polling.h"
#include "comm/progress_list.h"
#include "comm/shm/control_block.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>
#include <zeroth/comm/backend.h>
#include <zeroth/device/stream.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace zeroth::detail {

/// Whether peers are there. Threads of one process always are.
class Liveness {
 public:
  Liveness() = default;
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;
  virtual ~Liveness() = default;

  /// "pid 4711" or "".
  [[nodiscard]] virtual std::string identity(int world_rank) const = 0;
  /// "was killed by SIGKILL (signal 9)", or "" while the rank runs. Cheap.
  [[nodiscard]] virtual std::string death(int world_rank) const = 0;
  /// "has been stopped for 12.3 s (state T)", or "". Cheap while the rank runs.
  [[nodiscard]] virtual std::string freeze(int world_rank) const = 0;
};

/// The group on whose behalf somebody waits.
struct GroupView {
  std::string_view where{};  ///< "comm.shm"
  std::string_view group{};  ///< "world/dp"
  int rank = 0;
  std::span<const int> world_ranks{};         ///< of each group rank
  std::span<GroupControl* const> controls{};  ///< of each group rank
};

class Peers {
 public:
  struct Setup {
    int rank = 0;
    std::vector<JobControl*> controls{};        ///< by world rank
    std::vector<std::shared_ptr<void>> keep{};  ///< mappings of the controls
    std::unique_ptr<Liveness> liveness{};       ///< null: peers cannot die
    Milliseconds timeout{};
    Polling polling{};
    Watched watched{};
  };
  explicit Peers(Setup setup);
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;
  ~Peers();

  [[nodiscard]] int rank() const { return setup_.rank; }
  [[nodiscard]] Milliseconds timeout() const { return setup_.timeout; }
  [[nodiscard]] const Watched& watched() const { return setup_.watched; }

  /// Blocks until predicate() holds; throws as CommBackend::wait_until does. `context` is called only to
  /// describe a failure.
  void wait(const GroupView& view, FunctionRef<bool()> predicate, FunctionRef<WaitContext()> context);
  /// Throws if somebody whom the context awaits is lost, or the job is aborted, or the deadline has passed.
  void check(const GroupView& view, const Deadline& deadline, FunctionRef<WaitContext()> context);
  /// Likewise, unless predicate() holds once the failure is known: the peer may have done its part before it left.
  void check(const GroupView& view, const Deadline& deadline, FunctionRef<bool()> predicate,
             FunctionRef<WaitContext()> context);
  /// Wakes sleepers among these ranks.
  void notify(std::span<const int> world_ranks) noexcept;
  void throw_if_aborted(const GroupView& view, FunctionRef<WaitContext()> context) const;
  void abort(const Error& error) noexcept;

  /// Done in every wait(); a notify() wakes whoever sleeps for it, since a rank has one doorbell for all its groups.
  ProgressList progress{};
  /// This rank's number in the job.
  [[nodiscard]] int job_rank() const { return setup_.watched.job_rank(setup_.rank); }

  /// [Note: Program order] Matched calls of one rank run in the order of their submission on whatever stream:
  /// each waits for the event of the one before. Else two streams in chaos mode could make two ranks wait for
  /// each other.
  Event last_call{};

 private:
  struct Failure {
    Error error;
    std::string loss{};  ///< the peer that was lost first, as a sentence; empty for other failures
    int departed = -1;   ///< the world's rank that left in order: perhaps because of what this rank has not heard yet
  };
  /// Whether somebody whom the context awaits is lost, or the job is aborted, or the deadline has passed.
  [[nodiscard]] std::optional<Failure> find_failure(const GroupView& view, const Deadline& deadline,
                                                    FunctionRef<WaitContext()> context) const;
  [[nodiscard]] WaitReport report_of(const GroupView& view, const Deadline& deadline,
                                     FunctionRef<WaitContext()> context) const;
  /// Number in the job of one whom the wait cannot do without; Progress::kAnyRank if it does not know.
  [[nodiscard]] int awaited(const GroupView& view, FunctionRef<WaitContext()> context) const;
  [[nodiscard]] ShownAction& own_action() const;
  /// ", in action 1B3 of step 4 (stage 1 of 2: ...)"; "" where it is in none.
  [[nodiscard]] std::string last_action_of(int world_rank) const;
  [[nodiscard]] std::optional<Error> find_abort(const GroupView& view, FunctionRef<WaitContext()> context) const;
  [[noreturn]] void raise(const GroupView& view, FunctionRef<WaitContext()> context, const Failure& failure);
  /// [Note: Told losses] A rank that ends because it has lost a peer is lost to the others in turn, and they may notice
  /// only that. So it leaves word of whom it has lost: every rank names the first loss, whichever of them the user
  /// looks at.
  void tell_loss(const std::string& loss) noexcept;
  [[nodiscard]] std::string told_loss(int world_rank) const;

  Setup setup_;
};

/// Sleeps while `word` has `value`, at most `timeout`. For memory shared between processes.
void futex_wait(SharedFlag& word, std::uint32_t value, Milliseconds timeout) noexcept;
void futex_wake_all(SharedFlag& word) noexcept;

}  // namespace zeroth::detail
