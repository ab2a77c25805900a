// Ranks as threads for tests of the LibTorch adapter: every rank gets its World. No torch in here.
#pragma once

#include "support/rank_report.h"

#include <zeroth/engine/world.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace zeroth::test {

struct WorldRanksOptions {
  bool abort_on_failure = true;        ///< a rank that throws stops the others
  std::chrono::seconds deadline{240};  ///< after it the program ends with a text: a thread cannot be killed
};

/// Runs body(world) on `size` threads and returns what they threw.
[[nodiscard]] inline RankReport try_world(int size, const std::function<void(const World& world)>& body,
                                          const WorldRanksOptions& options = {}) {
  const std::shared_ptr<InprocHub> hub = make_inproc_hub(size);
  RankReport report;
  std::mutex mutex;
  std::condition_variable changed;
  int running = size;
  const auto run = [&](int rank) {
    std::optional<RankFailure> failure;
    const World world = World::from_hub(hub, rank, size);
    try {
      body(world);
    } catch (const Error& error) {
      failure = RankFailure{.rank = rank, .text = error.what(), .code = error.code()};
    } catch (const std::exception& error) {
      failure = RankFailure{.rank = rank, .text = error.what(), .code = std::nullopt};
    }
    if (failure && options.abort_on_failure) world.abort(Error(ErrorCode::kAborted, failure->text));
    const std::lock_guard lock(mutex);
    if (failure) report.failures.push_back(*std::move(failure));
    --running;
    changed.notify_all();
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run, rank);
  {
    std::unique_lock lock(mutex);
    const auto until = std::chrono::steady_clock::now() + options.deadline;
    if (!changed.wait_until(lock, until, [&] { return running == 0; })) {
      std::fprintf(stderr, "ranks still run after the deadline; failed so far:\n%s", report.text().c_str());
      std::abort();
    }
  }
  for (std::thread& thread : threads) thread.join();
  return report;
}

/// As try_world(), but throws std::runtime_error with all texts if a rank failed.
inline void run_world(int size, const std::function<void(const World& world)>& body) {
  try_world(size, body).require_ok();
}

}  // namespace zeroth::test
