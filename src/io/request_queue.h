// The queue over any engine: requests in, works out; resumes, checks, counts.
#pragma once

#include "device/stream_runtime.h"
#include "io/engine.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>
#include <zeroth/io/io_queue.h>

#include <sys/types.h>

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace zeroth::detail {

/// Shared by the queue and the works that it gave out; a work outlives its queue as an error.
class RequestFlow final : public CompletionSource, public std::enable_shared_from_this<RequestFlow> {
 public:
  RequestFlow(std::unique_ptr<IoEngine> engine, const IoQueueOptions& options);
  ~RequestFlow() override;

  [[nodiscard]] std::shared_ptr<Completion> add(std::span<const IoRequest> requests);
  /// Takes ends and starts what waits; waits for the first end at most `wait`. Returns whether anything has ended.
  bool turn(Milliseconds wait);
  void run_until(Completion& completion) override;
  [[nodiscard]] bool ready(Completion& completion) override;
  /// The queue goes; see ~IoQueue().
  void close() noexcept;
  /// Throws kUsage in a forked child, or on another thread than the one that the options promise.
  void check_caller(const char* call) const;

  [[nodiscard]] const IoEngine& engine() const { return *engine_; }
  [[nodiscard]] std::size_t pending() const { return waiting_.size() + in_flight_; }
  [[nodiscard]] const IoCounters& counters() const { return counters_; }

 private:
  struct Batch {
    std::shared_ptr<Completion> completion{};
    std::size_t left = 0;
    std::exception_ptr error{};
  };
  /// A request on its way.
  struct Task {
    IoRequest request{};
    std::shared_ptr<Batch> batch{};
    std::size_t moved = 0;            ///< bytes that are done
    int fruitless = 0;                ///< transfers in a row that moved less than a block
    SteadyClock::time_point begun{};  ///< by the request's clock
    SteadyClock::time_point ended{};  ///< TransferEnd::at of its last transfer
  };

  void start_waiting();
  [[nodiscard]] SteadyClock::time_point now() const { return clock_ ? clock_->now() : SteadyClock::now(); }
  void take(const TransferEnd& ended);
  void take_moved(std::size_t slot, std::size_t bytes);
  void again(std::size_t slot, bool counts);
  void end(Task task, std::exception_ptr error);
  void drop_waiting() noexcept;
  [[nodiscard]] Transfer transfer_of(std::size_t slot) const;
  [[nodiscard]] std::string oldest() const;
  [[nodiscard]] ErrorContext context_of(const Task& task) const;

  std::unique_ptr<IoEngine> engine_;
  Milliseconds timeout_;
  std::function<void()> watch_;
  Logger log_;
  pid_t process_;
  std::optional<std::thread::id> thread_;
  std::deque<Task> waiting_;
  std::vector<std::optional<Task>> slots_;  ///< of what the engine has; the index is the id of the transfer
  std::vector<std::size_t> free_slots_;
  std::size_t in_flight_ = 0;
  std::vector<TransferEnd> ends_;
  std::vector<Transfer> starting_;
  IoCounters counters_;
  std::shared_ptr<TransferClock> clock_;  ///< of the last request that has one
  SteadyClock::time_point looked_{};      ///< when the engine was last asked for ends
  bool closed_ = false;
};

/// A queue over this engine. `reason`: see IoQueue::reason().
[[nodiscard]] std::unique_ptr<IoQueue> make_request_queue(std::unique_ptr<IoEngine> engine,
                                                          const IoQueueOptions& options, std::string reason);

}  // namespace zeroth::detail
