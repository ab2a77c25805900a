// The thread pool for CPU kernels: fixed threads, owned by one engine. The destructor joins them.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace zeroth {

/// `threads` includes the caller: ThreadPool(1) starts no thread and runs everything in place.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();

  [[nodiscard]] int threads() const { return threads_; }

  /// Splits [0, count) into at most threads() contiguous ranges at multiples of `grain` and runs body(begin, end) on
  /// each. Blocks until all are done. Rethrows the first exception. Not reentrant.
  void parallel_for(std::size_t count, std::size_t grain, const std::function<void(std::size_t, std::size_t)>& body);

 private:
  struct State;
  int threads_;
  std::unique_ptr<State> state_;
};

}  // namespace zeroth
