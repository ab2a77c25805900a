#include "base/own_thread.h"
#include "io/engine.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace zeroth::detail {
namespace {

TransferEnd carry_out(const Transfer& transfer) {
  const auto offset = static_cast<off_t>(transfer.offset);
  ssize_t moved = -1;
  if (!ZR_FAILPOINT_ERRNO("io.threads.transfer")) {
    moved = transfer.op == IoOp::kRead ? ::pread(transfer.descriptor, transfer.data, transfer.bytes, offset)
                                       : ::pwrite(transfer.descriptor, transfer.data, transfer.bytes, offset);
  }
  const std::int64_t result = moved < 0 ? -errno : moved;
  return {.id = transfer.id, .result = result, .at = SteadyClock::now()};
}

class ThreadEngine final : public IoEngine {
 public:
  ThreadEngine(int depth, int num_threads) : depth_(depth) {
    const int wanted = std::min(depth, num_threads);
    try {
      for (int thread = 0; thread < wanted; ++thread)
        threads_.push_back(start_own_thread([this] { work(); }, "files", {.where = "io.threads"}));
    } catch (...) {
      stop();
      throw;
    }
  }
  ~ThreadEngine() override { stop(); }

  std::string_view name() const override { return "threads"; }
  int depth() const override { return depth_; }

  std::size_t start(std::span<const Transfer> transfers) override {
    {
      const std::lock_guard lock(mutex_);
      waiting_.insert(waiting_.end(), transfers.begin(), transfers.end());
    }
    if (transfers.size() == 1) {
      work_there_.notify_one();
    } else {
      work_there_.notify_all();
    }
    return transfers.size();
  }

  std::size_t reap(std::span<TransferEnd> ends, Milliseconds wait) override {
    std::unique_lock lock(mutex_);
    if (ended_.empty() && wait.count() > 0) end_there_.wait_for(lock, wait, [this] { return !ended_.empty(); });
    const std::size_t count = std::min(ends.size(), ended_.size());
    std::copy_n(ended_.begin(), count, ends.begin());
    ended_.erase(ended_.begin(), ended_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }

 private:
  void stop() noexcept {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    work_there_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_there_.wait(lock, [this] { return stopped_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const Transfer transfer = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      TransferEnd end{.id = transfer.id, .result = -EIO};
      try {
        end = carry_out(transfer);
      } catch (const Error&) {  // a planted one: nothing may leave the thread
      }
      lock.lock();
      ended_.push_back(end);
      end_there_.notify_one();
    }
  }

  const int depth_;
  std::mutex mutex_;
  std::condition_variable work_there_;
  std::condition_variable end_there_;
  std::deque<Transfer> waiting_;
  std::deque<TransferEnd> ended_;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> make_thread_engine(int depth, int num_threads) {
  return std::make_unique<ThreadEngine>(depth, num_threads);
}

}  // namespace zeroth::detail
