// What stands behind Stream: the two CPU execution modes, inline and chaos, and CUDA (cuda/cuda_runtime.h).
#pragma once

#include <zeroth/device/stream.h>

#include <exception>
#include <functional>
#include <memory>

namespace zeroth::detail {

class CompletionSource;

/// A point in the history of one stream. Complete when `done`; `error` is the first exception before it.
struct Completion {
  std::shared_ptr<CompletionSource> source;
  bool done = false;
  std::exception_ptr error;
  std::shared_ptr<void> native{};  ///< the device's own event, if there is one
};

/// Who knows when a point is reached.
class CompletionSource {
 public:
  CompletionSource() = default;
  CompletionSource(const CompletionSource&) = delete;
  CompletionSource& operator=(const CompletionSource&) = delete;
  virtual ~CompletionSource() = default;

  /// Blocks until `completion` is done; with an error in it, or thrown, where it never will be.
  virtual void run_until(Completion& completion) = 0;
  /// Whether it is done, without blocking.
  [[nodiscard]] virtual bool ready(Completion& completion) { return completion.done; }
};

class StreamRuntime : public CompletionSource, public std::enable_shared_from_this<StreamRuntime> {
 public:
  [[nodiscard]] virtual int add_stream() = 0;
  virtual void enqueue(int stream, std::function<void()> task) = 0;
  [[nodiscard]] virtual std::shared_ptr<Completion> record(int stream) = 0;
  virtual void order_after(int stream, std::shared_ptr<Completion> completion) = 0;
  /// The device goes: tasks that have not run are dropped, and who waits for them gets kAborted. Also what ends the
  /// circle of runtime -> task or completion -> runtime.
  virtual void close() noexcept {}
  [[nodiscard]] virtual bool runs_inline() const = 0;
  /// See Stream::native().
  [[nodiscard]] virtual void* native_stream(int /*stream*/) const { return nullptr; }
};

/// For a runtime that cannot look into another one's queues: blocks the host until a point of theirs is reached.
void finish_foreign(const StreamRuntime& runtime, Completion& completion);

/// A nested one runs inside tasks of others (make_nested_stream()).
enum class InlineKind { kOutermost, kNested };
[[nodiscard]] std::shared_ptr<StreamRuntime> make_inline_runtime(InlineKind kind = InlineKind::kOutermost);
[[nodiscard]] std::shared_ptr<StreamRuntime> make_chaos_runtime(std::uint64_t seed);

}  // namespace zeroth::detail
