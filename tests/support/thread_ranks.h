// Ranks as threads: run a function on every rank of an inproc world, collect what they throw, never hang.
#pragma once

#include "support/rank_report.h"
#include "support/thread_groups.h"

#include <zeroth/comm/factory.h>
#include <zeroth/comm/rank_activity.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::test {

/// Waits of at most 30 s: long enough for a loaded machine under a sanitizer, short enough for a test.
[[nodiscard]] inline CommOptions quick_options() {
  CommOptions options;
  const char* const set = std::getenv("ZEROTH_TEST_TIMEOUT_MS");  // where a rank is known to wait in vain
  options.timeout = Milliseconds{set != nullptr ? std::atoi(set) : 30'000};
  return options;
}

struct ThreadRanksOptions {
  CommOptions comm = quick_options();
  bool abort_on_failure = true;  ///< a rank that throws stops the others; false: they find out by themselves
  ThreadTransport transport = ThreadTransport::kMemory;
  std::vector<std::shared_ptr<RankActivity>> activities{};  ///< one a rank, or none
  /// The group over that of the transport; empty: that itself.
  std::function<std::unique_ptr<CommBackend>(int rank, std::unique_ptr<CommBackend> base, const CommOptions& options)>
      group_over{};
  Milliseconds deadline{120'000};  ///< after it the test program ends with a text: a thread cannot be killed
};

using RankBody = std::function<void(int rank, const std::shared_ptr<CommBackend>& backend)>;

/// Runs body(rank, backend) on `world` threads and returns what they threw.
[[nodiscard]] inline RankReport try_ranks(int world, const RankBody& body, const ThreadRanksOptions& options = {}) {
  const ThreadGroups groups(world, options.transport, options.comm.nodes);
  RankReport report;
  std::mutex mutex;
  std::condition_variable changed;
  int running = world;
  const auto run = [&](int rank) {
    std::optional<RankFailure> failure;
    try {
      CommOptions comm = options.comm;
      if (!options.activities.empty()) comm.activity = options.activities[static_cast<std::size_t>(rank)];
      std::unique_ptr<CommBackend> base = groups.group(rank, comm);
      const std::shared_ptr<CommBackend> backend =
          options.group_over ? options.group_over(rank, std::move(base), comm) : std::move(base);
      try {
        body(rank, backend);
      } catch (const Error& error) {
        if (options.abort_on_failure) backend->abort(error);
        throw;
      } catch (const std::exception& error) {
        if (options.abort_on_failure) backend->abort(Error(ErrorCode::kInternal, error.what()));
        throw;
      }
    } catch (const Error& error) {
      failure = RankFailure{.rank = rank, .text = error.what(), .code = error.code()};
    } catch (const std::exception& error) {
      failure = RankFailure{.rank = rank, .text = error.what(), .code = std::nullopt};
    }
    const std::lock_guard lock(mutex);
    if (failure) report.failures.push_back(*std::move(failure));
    --running;
    changed.notify_all();
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) threads.emplace_back(run, rank);
  {
    std::unique_lock lock(mutex);
    if (!changed.wait_until(lock, std::chrono::steady_clock::now() + options.deadline, [&] { return running == 0; })) {
      std::fprintf(stderr, "ranks still run after the deadline; failed so far:\n%s", report.text().c_str());
      std::abort();
    }
  }
  for (std::thread& thread : threads) thread.join();
  return report;
}

/// As try_ranks(), but throws std::runtime_error with all texts if a rank failed.
inline void run_ranks(int world, const RankBody& body, const ThreadRanksOptions& options = {}) {
  try_ranks(world, body, options).require_ok();
}

}  // namespace zeroth::test
