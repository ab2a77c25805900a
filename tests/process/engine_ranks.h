// Ranks of the toy engine that are processes: how they live, and what is expected of them when one of them fails.
#pragma once

#include "support/fork_ranks.h"
#include "support/left_behind.h"
#include "support/toy_training.h"

#include <zeroth/comm/factory.h>
#include <zeroth/device/device.h>

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <exception>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {

inline constexpr int kWorld = 3;

enum class Fault { kKill, kFreeze, kExit, kThrow, kInterrupt };

constexpr const char* name_of(Fault fault) {
  switch (fault) {
    case Fault::kKill:
      return "Kill";
    case Fault::kFreeze:
      return "Freeze";
    case Fault::kExit:
      return "Exit";
    case Fault::kThrow:
      return "Throw";
    case Fault::kInterrupt:
      return "Interrupt";
  }
  return "";
}

constexpr int signal_of(Fault fault) {
  switch (fault) {
    case Fault::kFreeze:
      return SIGSTOP;
    case Fault::kInterrupt:
      return SIGINT;
    default:
      return SIGKILL;
  }
}

/// What befalls the rank that calls this.
inline void strike(Fault fault) {
  if (fault == Fault::kExit) ::_exit(0);
  if (fault == Fault::kThrow) throw std::runtime_error("planted exception");
  ::raise(signal_of(fault));
}

inline CommOptions process_options() {
  CommOptions options;
  options.timeout = Milliseconds(20'000);
  options.frozen_after = Milliseconds(400);
  return options;
}

inline ToyTraining process_training(int zero_stage) {
  ToyTraining training;
  training.model = {.width = 40, .blocks = 4};
  training.world = kWorld;
  training.plan = zero_plan(zero_stage, {"dp"});
  return training;
}

/// Trains as one rank, in its process. However that ends, the rank gives back what it held: programs may catch the
/// error and go on.
inline void train_as_rank(const ToyTraining& training, int rank, const std::string& job) {
  std::signal(SIGINT, SIG_DFL);  // ignored in what a script starts in its background
  const std::set<std::string> before = holdings();
  std::exception_ptr failure;
  try {
    const WorldSpec spec{.rank = rank, .size = training.world, .job = job, .options = process_options()};
    std::unique_ptr<CommBackend> backend = make_backend("shm", spec);
    // Who still meets the others may see the end of a survivor before it can hear of the victim, and name that one.
    const Collective barrier{.kind = CollectiveKind::kBarrier};
    backend->submit({&barrier, 1}, make_cpu_device()->make_stream("meeting")).wait();
    (void)train_toy_rank(training, std::move(backend));
  } catch (...) {
    failure = std::current_exception();
  }
  if (const std::string held = still_held(before); !held.empty()) throw std::runtime_error("rank still holds\n" + held);
  if (failure) std::rethrow_exception(failure);
}

/// Waiting for anything longer than this means that a rank hangs: all other limits are above it.
inline constexpr Milliseconds kHangs{15'000};

/// For ForkRanksOptions::meanwhile: wakes a frozen rank when the others have given it up, so that it can find out and
/// end as well. True while there is more to wait for.
[[nodiscard]] inline bool wait_to_wake(const std::vector<pid_t>& pids, int frozen) {
  for (std::size_t rank = 0; rank < pids.size(); ++rank) {
    if (static_cast<int>(rank) != frozen && ::kill(pids[rank], 0) == 0) return true;
  }
  ::kill(pids[static_cast<std::size_t>(frozen)], SIGCONT);
  return false;
}

inline void expect_nobody_hung(const ForkReport& report) {
  for (const ProcessEnd& end : report.ends) {
    EXPECT_FALSE(end.killed_at_deadline) << "rank " << end.rank << "\n" << report.text();
  }
}

/// Every rank ended by itself; all but the victim with an error that names the victim, a frozen victim with an error
/// too.
inline void expect_victim_is_named(const ForkReport& report, Fault fault, int victim) {
  expect_nobody_hung(report);
  for (const ProcessEnd& end : report.ends) {
    const bool survivor = end.rank != victim;
    if (!survivor && fault != Fault::kFreeze) continue;
    const RankFailure* failure = report.of(end.rank);
    if (failure == nullptr) {
      ADD_FAILURE() << "rank " << end.rank << " ended well\n" << report.text();
      continue;
    }
    EXPECT_TRUE(failure->code == ErrorCode::kPeerLost || failure->code == ErrorCode::kAborted) << failure->text;
    if (survivor) {
      EXPECT_NE(failure->text.find("rank " + std::to_string(victim)), std::string::npos) << failure->text;
    }
  }
}

}  // namespace zeroth::test
