// The pool for CPU kernels: fixed threads, owned by one engine, joined in the destructor.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace zeroth {

/// `threads` counts the caller: ThreadPool(1) starts none and runs everything in place.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();

  [[nodiscard]] int threads() const { return threads_; }

  /// Splits [0, count) into at most threads() contiguous ranges at multiples of `grain` and runs body(begin, end) on
  /// each; blocks until all are done and rethrows the first exception. Not reentrant.
  void parallel_for(std::size_t count, std::size_t grain, const std::function<void(std::size_t, std::size_t)>& body);

 private:
  struct State;
  int threads_;
  std::unique_ptr<State> state_;
};

}  // namespace zeroth
