#include "support/sanitizer.h"

#include <zeroth/base/error.h>
#include <zeroth/device/thread_pool.h>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

using Ranges = std::vector<std::pair<std::size_t, std::size_t>>;

Ranges split(ThreadPool& pool, std::size_t count, std::size_t grain) {
  std::mutex mutex;
  Ranges ranges;
  pool.parallel_for(count, grain, [&](std::size_t begin, std::size_t end) {
    const std::lock_guard lock(mutex);
    ranges.emplace_back(begin, end);
  });
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

TEST(ThreadPool, CoversExactlyOnceAtMultiplesOfTheGrain) {
  for (const int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const std::size_t count : {0U, 1U, 2U, 63U, 64U, 65U, 1000U, 4099U}) {
      for (const std::size_t grain : {0U, 1U, 7U, 64U, 5000U}) {
        const Ranges ranges = split(pool, count, grain);
        EXPECT_LE(ranges.size(), static_cast<std::size_t>(threads));
        std::size_t next = 0;
        for (const auto& [begin, end] : ranges) {
          EXPECT_EQ(begin, next);
          EXPECT_LT(begin, end) << "an empty range must not be run";
          EXPECT_EQ(begin % std::max<std::size_t>(1, grain), 0U);
          next = end;
        }
        EXPECT_EQ(next, count) << threads << " threads, grain " << grain;
      }
    }
  }
}

RC_GTEST_PROP(ThreadPoolProperty, PiecesDifferByAtMostOneGrain, ()) {
  const auto threads = *rc::gen::inRange(1, 6);
  const auto count = *rc::gen::inRange<std::size_t>(1, 100000);
  const auto grain = *rc::gen::inRange<std::size_t>(1, 500);
  ThreadPool pool(threads);
  std::size_t least = count;
  std::size_t most = 0;
  std::size_t sum = 0;
  const Ranges ranges = split(pool, count, grain);
  for (const auto& [begin, end] : ranges) {
    const std::size_t pieces = (end - begin + grain - 1) / grain;
    least = std::min(least, pieces);
    most = std::max(most, pieces);
    sum += end - begin;
  }
  RC_ASSERT(sum == count);
  const std::size_t all = (count + grain - 1) / grain;
  if (all >= static_cast<std::size_t>(threads)) {
    RC_ASSERT(ranges.size() == static_cast<std::size_t>(threads));
    RC_ASSERT(most - least <= 1U);
  }
}

TEST(ThreadPool, OneThreadIsTheCaller) {
  ThreadPool pool(1);
  std::thread::id id;
  pool.parallel_for(100000, 1, [&id](std::size_t, std::size_t) { id = std::this_thread::get_id(); });
  EXPECT_EQ(id, std::this_thread::get_id());
}

TEST(ThreadPool, UsesItsOwnThreadsAgainAndAgain) {
  ThreadPool pool(3);
  std::mutex mutex;
  std::set<std::thread::id> ids;
  std::atomic<std::size_t> sum{0};
  for (int turn = 0; turn < 300; ++turn) {
    pool.parallel_for(300, 1, [&](std::size_t begin, std::size_t end) {
      sum += end - begin;
      const std::lock_guard lock(mutex);
      ids.insert(std::this_thread::get_id());
    });
  }
  EXPECT_EQ(sum, 300U * 300U);
  EXPECT_EQ(ids.size(), 3U);
}

TEST(ThreadPool, WritesOfAllThreadsAreSeenWhenItReturns) {
  ThreadPool pool(4);
  std::vector<int> values(10007, 0);
  for (int turn = 1; turn <= 20; ++turn) {
    pool.parallel_for(values.size(), 64, [&](std::size_t begin, std::size_t end) {
      for (std::size_t at = begin; at < end; ++at) ++values[at];
    });
    ASSERT_TRUE(std::all_of(values.begin(), values.end(), [turn](int value) { return value == turn; }));
  }
}

TEST(ThreadPool, RethrowsAfterAllAreDoneAndStaysUsable) {
  for (const int threads : {1, 4}) {
    ThreadPool pool(threads);
    for (std::size_t thrower = 0; thrower < static_cast<std::size_t>(threads); ++thrower) {
      std::atomic<int> others{0};
      const auto body = [&](std::size_t begin, std::size_t) {
        if (begin == thrower) throw std::runtime_error("range " + std::to_string(begin));
        ++others;
      };
      EXPECT_THROW(pool.parallel_for(static_cast<std::size_t>(threads), 1, body), std::runtime_error);
      EXPECT_EQ(others, threads - 1) << "the others finish before the caller goes on";
    }
    EXPECT_EQ(split(pool, 64, 1).back().second, 64U);
  }
}

TEST(ThreadPool, AllMayThrowAndOneArrives) {
  ThreadPool pool(4);
  for (int turn = 0; turn < 50; ++turn) {
    EXPECT_THROW(pool.parallel_for(4, 1, [](std::size_t, std::size_t) { throw std::logic_error("each"); }),
                 std::logic_error);
  }
}

TEST(ThreadPool, PoolsMayNestAndLiveSideBySide) {
  ThreadPool outer(2);
  std::atomic<std::size_t> sum{0};
  outer.parallel_for(2, 1, [&](std::size_t, std::size_t) {
    ThreadPool inner(2);
    inner.parallel_for(10, 1, [&](std::size_t begin, std::size_t end) { sum += end - begin; });
  });
  EXPECT_EQ(sum, 20U);
}

TEST(ThreadPool, RefusesAbsurdCounts) {
  for (const int threads : {0, -1, 1025}) {
    try {
      const ThreadPool pool(threads);
      ADD_FAILURE() << threads;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
    }
  }
}

TEST(ThreadPool, SaysSoWhenThreadsCannotBeStarted) {
  if (test::kSanitized) GTEST_SKIP() << "not under sanitizers: they need all of the address space";
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    const rlimit limit{std::size_t{512} << 20U, std::size_t{512} << 20U};  // too little for the stacks of 1,023 threads
    ::setrlimit(RLIMIT_AS, &limit);
    try {
      const ThreadPool pool(1024);
      ::_exit(10);
    } catch (const Error& error) {
      ::_exit(error.code() == ErrorCode::kResource ? 0 : 11);
    }
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace zeroth
