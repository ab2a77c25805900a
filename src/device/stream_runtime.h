// The two CPU execution modes behind Stream: inline and chaos.
#pragma once

#include <exception>
#include <functional>
#include <memory>

#include <zeroth/device/stream.h>

namespace zeroth::detail {

/// A point in the history of one stream. Complete when `done`; `error` is the first exception before it.
struct Completion {
  std::shared_ptr<StreamRuntime> runtime;
  bool done = false;
  std::exception_ptr error;
};

class StreamRuntime : public std::enable_shared_from_this<StreamRuntime> {
 public:
  StreamRuntime() = default;
  StreamRuntime(const StreamRuntime&) = delete;
  StreamRuntime& operator=(const StreamRuntime&) = delete;
  virtual ~StreamRuntime() = default;

  [[nodiscard]] virtual int add_stream() = 0;
  virtual void enqueue(int stream, std::function<void()> task) = 0;
  [[nodiscard]] virtual std::shared_ptr<Completion> record(int stream) = 0;
  virtual void order_after(int stream, std::shared_ptr<Completion> completion) = 0;
  /// Runs what is needed until `completion` is done.
  virtual void run_until(Completion& completion) = 0;
  /// The device goes: tasks that have not run are dropped, and who waits for them gets kAborted. Also what ends the circle of
  /// runtime -> task or completion -> runtime.
  virtual void close() noexcept {}
  [[nodiscard]] virtual bool runs_inline() const = 0;
};

[[nodiscard]] std::shared_ptr<StreamRuntime> make_inline_runtime();
[[nodiscard]] std::shared_ptr<StreamRuntime> make_chaos_runtime(std::uint64_t seed);

}  // namespace zeroth::detail
