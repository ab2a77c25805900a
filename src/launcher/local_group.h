// The ranks that are children of this process.
#pragma once

#include "base/unique_fd.h"
#include "launcher/ended_board.h"
#include "launcher/host_task.h"
#include "launcher/keeper.h"
#include "launcher/rank_group.h"
#include "launcher/signals.h"

#include <sys/resource.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zeroth::launcher {

/// What ranks get from the process that starts them.
struct StartContext {
  const InheritedSignals* inherited;
  rlimit descriptors;  ///< from reserve_descriptors
  int stdin_fd = -1;   ///< rank 0's standard input, if not -1; borrowed, for the start only
};

/// One at most in a process, which starts no other children meanwhile and is a subreaper: see [Note: End of a rank].
class LocalGroup final : public RankGroup {
 public:
  /// Starts every rank. A failure throws what find_program and spawn_rank throw, and what was started until
  /// then ends. `listener` outlives this.
  LocalGroup(const HostTask& task, const StartContext& context, GroupListener& listener);

  /// What was chosen for the user, to be told once: "OMP_NUM_THREADS=4 in every rank (8 cores, 2 ranks)".
  [[nodiscard]] const std::vector<std::string>& notes() const { return notes_; }

  [[nodiscard]] std::vector<int> pids() const;

  void add_polled(std::vector<pollfd>& polled) const override;
  void handle(std::span<const pollfd> polled) override;
  void look_for_exits() override;
  void settle() override;
  [[nodiscard]] std::optional<TimePoint> next() const override;
  void signal_groups(int signal) override;
  void signal_ranks(int signal) override;
  void other_rank_ended(const EndedRank& rank) override { board_.add(rank); }
  std::vector<std::string> abandon() override;
  [[nodiscard]] int num_running() const override;
  [[nodiscard]] bool gone() const override;

 private:
  enum class State { kRunning, kLingering, kEnding, kGone };

  struct Rank {
    int number;
    RankProcess process;
    std::array<UniqueFd, 2> pipes;  // by Stream; closed at their end
    State state = State::kRunning;
    TimePoint until{};  ///< end of lingering, then of waiting for the rest of the group

    [[nodiscard]] bool drained() const { return !pipes[0].valid() && !pipes[1].valid(); }
  };

  /// Reads at most one block and returns its bytes; 0 when there is nothing to read now or ever.
  std::size_t read_some(Rank& rank, Stream stream);
  /// Reads what is in the pipes at this moment; bounded even if somebody keeps writing.
  void drain(Rank& rank);
  void close(Rank& rank, Stream stream);
  void reap_orphans();
  /// Says so if the kernel has ended a process for lack of memory, most likely this one.
  void explain_kill(const Rank& rank);
  /// Ends what the ranks have left behind outside of their process groups.
  void sweep();

  GroupListener* listener_;
  std::vector<std::string> notes_;
  Keeper keeper_;
  EndedBoard board_;
  std::vector<Rank> ranks_;
  std::optional<std::int64_t> oom_kills_;  ///< so far
  std::vector<pid_t>
      before_;  ///< children of this process that are not of the ranks: who became zeroth-run by exec had them
  bool swept_ = false;
  TimePoint sweep_until_{};
};

}  // namespace zeroth::launcher
