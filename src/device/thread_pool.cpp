#include <zeroth/base/error.h>
#include <zeroth/device/thread_pool.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth {

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable start;
  std::condition_variable finished;
  std::atomic<std::uint64_t> generation{0};  // changed under the mutex
  std::atomic<int> running{0};               // likewise
  bool stop = false;
  const std::function<void(std::size_t, std::size_t)>* body = nullptr;
  std::vector<std::pair<std::size_t, std::size_t>> ranges;  // one a thread, the caller's first
  std::exception_ptr error;
  std::vector<std::thread> workers;

  void join() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    start.notify_all();
    for (std::thread& worker : workers) worker.join();
    workers.clear();
  }
  void work(std::size_t index);
};

/// Looks for a moment before it sleeps: one call after another finds its threads awake.
template <class Predicate>
void spin_for(const Predicate& predicate) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(20);
  while (!predicate() && std::chrono::steady_clock::now() < end) __builtin_ia32_pause();
}

void ThreadPool::State::work(std::size_t index) {
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex);
  while (true) {
    lock.unlock();
    spin_for([&] { return generation.load() != seen; });
    lock.lock();
    start.wait(lock, [&] { return stop || generation != seen; });
    if (stop) return;
    seen = generation;
    const auto [begin, end] = ranges[index];
    lock.unlock();
    std::exception_ptr thrown;
    try {
      if (begin < end) (*body)(begin, end);
    } catch (...) {
      thrown = std::current_exception();
    }
    lock.lock();
    if (thrown && !error) error = std::move(thrown);
    if (--running == 0) finished.notify_one();
  }
}

ThreadPool::ThreadPool(int threads) : threads_(threads), state_(std::make_unique<State>()) {
  ZR_CHECK(threads >= 1 && threads <= 1024, ErrorCode::kUsage, "a thread pool needs 1 to 1024 threads",
           {.where = "device.thread_pool", .got = std::to_string(threads)});
  state_->workers.reserve(static_cast<std::size_t>(threads));
  try {
    for (int index = 1; index < threads; ++index) {
      state_->workers.emplace_back([state = state_.get(), index] { state->work(static_cast<std::size_t>(index)); });
    }
  } catch (const std::system_error& error) {
    state_->join();  // those that did start: a thread must not be destroyed while it can be joined
    throw Error(ErrorCode::kResource, std::string("a thread cannot be started: ") + error.what(),
                {.where = "device.thread_pool",
                 .expected = std::to_string(threads) + " threads",
                 .hint = "raise the limit of processes (ulimit -u, pids.max) or memory, or ask for fewer threads"});
  }
}

ThreadPool::~ThreadPool() {
  state_->join();
}

void ThreadPool::parallel_for(std::size_t count, std::size_t grain,
                              const std::function<void(std::size_t, std::size_t)>& body) {
  if (count == 0) return;
  const std::size_t step = std::max<std::size_t>(1, grain);
  const std::size_t pieces = (count + step - 1) / step;
  const auto threads = static_cast<std::size_t>(threads_);
  if (threads == 1 || pieces == 1) {
    body(0, count);
    return;
  }
  std::vector<std::pair<std::size_t, std::size_t>> ranges(threads);
  for (std::size_t index = 0; index < threads; ++index) {
    ranges[index] = {std::min(count, pieces * index / threads * step),
                     std::min(count, pieces * (index + 1) / threads * step)};
  }
  {
    const std::lock_guard lock(state_->mutex);
    state_->body = &body;
    state_->ranges = std::move(ranges);
    state_->running = threads_ - 1;
    ++state_->generation;
  }
  state_->start.notify_all();
  std::exception_ptr own;
  try {
    const auto [begin, end] = state_->ranges[0];
    if (begin < end) body(begin, end);
  } catch (...) {
    own = std::current_exception();
  }
  spin_for([&] { return state_->running.load() == 0; });
  std::unique_lock lock(state_->mutex);
  state_->finished.wait(lock, [&] { return state_->running == 0; });
  std::exception_ptr error = std::exchange(state_->error, nullptr);
  lock.unlock();
  if (own) std::rethrow_exception(own);
  if (error) std::rethrow_exception(error);
}

}  // namespace zeroth
