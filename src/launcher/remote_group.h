// The ranks that an agent runs, on another host or on this one.
#pragma once

#include "launcher/agent_link.h"
#include "launcher/host_task.h"
#include "launcher/rank_group.h"

#include <memory>
#include <string>
#include <vector>

namespace zeroth::launcher {

class RemoteGroup final : public RankGroup {
 public:
  /// Sends the task at once. `link` has said hello; `listener` outlives this. An agent that says nothing for
  /// `lost_after` is lost.
  RemoteGroup(std::unique_ptr<AgentLink> link, const HostTask& task, GroupListener& listener, Milliseconds lost_after,
              bool quiet);

  void add_polled(std::vector<pollfd>& polled) const override;
  void handle(std::span<const pollfd> polled) override;
  void look_for_exits() override;
  void settle() override;
  [[nodiscard]] std::optional<TimePoint> next() const override;
  void signal_groups(int signal) override;
  void signal_ranks(int signal) override;
  void other_rank_ended(const EndedRank& rank) override;
  std::vector<std::string> abandon() override;
  [[nodiscard]] std::optional<TimePoint> in_doubt_until() const override;
  void end_job(const JobEnd& end) override;
  [[nodiscard]] int num_running() const override { return num_running_; }
  [[nodiscard]] bool gone() const override { return state_ == State::kGone; }
  [[nodiscard]] bool closed() const override { return closed_; }

 private:
  enum class State { kStarting, kRunning, kGone };

  void take_frames();
  void take(const Frame& frame);
  void finish_rank(int rank, const RankEnd& end);
  void give_credit();
  void tell_ended();
  /// The host is out of control: its connection is closed.
  void fail(const Error& error);
  /// No rank of it runs.
  void end_badly(const Error& error);
  [[nodiscard]] std::size_t local(int rank) const;

  std::unique_ptr<AgentLink> link_;
  GroupListener* listener_;
  int first_rank_;
  Milliseconds lost_after_;
  bool quiet_;
  bool closed_ = false;
  State state_ = State::kStarting;
  SilenceWatch watch_;
  std::vector<int> pids_;
  std::vector<bool> ended_;
  int num_running_;
  std::size_t uncredited_bytes_ = 0;
  std::vector<EndedRank> ended_elsewhere_;  ///< that the host has not been told of
  TimePoint tell_ended_at_{};
};

}  // namespace zeroth::launcher
