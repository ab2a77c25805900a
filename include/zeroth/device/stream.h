// Streams, events and works: when things happen, and how to wait for them.
//
// A Stream is an ordered queue of tasks. What "later" means is the device's execution mode:
//   inline  production on CPU: a task runs at once on the caller's thread (a thread hand-off costs 11-49 us)
//   chaos   tests: tasks wait in their queues and run in a seeded legal order, as late as an event, a wait or luck
//   allows,
//           so that every missing dependency shows as wrong data on some seed
//   cuda    a task runs at once on the caller's thread and gives work to Stream::native(); that work runs later, on the
//   device.
//           Tasks of such a stream order device work after device work without the host: only Event::wait() waits.
#pragma once

#include <zeroth/base/deadline.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

namespace detail {
struct Completion;  ///< one point in one stream's history; defined by its source
class StreamRuntime;
}  // namespace detail

/// A point in a stream. Copyable; an empty event is complete.
class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<detail::Completion> completion) : completion_(std::move(completion)) {}

  [[nodiscard]] bool ready() const;
  /// Blocks the host until everything before the point has run (in chaos mode it runs what is needed, and by luck
  /// more).
  void wait() const;

 private:
  friend class Stream;
  std::shared_ptr<detail::Completion> completion_;
};

/// An ordered queue. Copyable handle; one thread at a time.
class Stream {
 public:
  Stream() = default;
  Stream(std::shared_ptr<detail::StreamRuntime> runtime, int index, std::string name);

  /// Adds a task. It may run before this returns (inline) or later (chaos, CUDA); it owns what it captures.
  /// After an exception of a task nothing runs in the stream until the next record(): that event (or Work) carries the
  /// exception, every wait on it throws it, streams ordered after it fail in turn, and the stream itself goes on. A
  /// task may enqueue, and wait for events of other streams; what it adds to its own stream runs in place in inline
  /// mode, else after it, so it must not wait for that (chaos: kInternal).
  void enqueue(std::function<void()> task) const;
  /// The point after all tasks so far.
  [[nodiscard]] Event record() const;
  /// Tasks added from now on run after `event`.
  void order_after(const Event& event) const;
  /// record().wait()
  void synchronize() const;

  [[nodiscard]] const std::string& name() const { return name_; }
  /// True if a task has always run when enqueue() returns.
  [[nodiscard]] bool runs_inline() const;
  /// The device's own handle (a cudaStream_t); null where tasks run on the host. Lives as long as the device.
  [[nodiscard]] void* native() const;

 private:
  std::shared_ptr<detail::StreamRuntime> runtime_;
  int index_ = 0;
  std::string name_;
};

/// What a Work was, for messages and traces.
struct WorkInfo {
  std::string what;
  std::uint64_t bytes = 0;
};

/// One completion, two verbs. Owns (through its tasks) what must stay alive until done.
class [[nodiscard]] Work {
 public:
  Work() = default;
  Work(Event event, WorkInfo info) : event_(std::move(event)), info_(std::move(info)) {}

  /// Blocks the host until done; throws what the work threw.
  void wait() const { event_.wait(); }
  /// Orders later tasks of `stream` after this work, without blocking the host.
  void order_before(const Stream& stream) const { stream.order_after(event_); }
  [[nodiscard]] const Event& event() const { return event_; }
  [[nodiscard]] const WorkInfo& info() const { return info_; }

 private:
  Event event_;
  WorkInfo info_;
};

}  // namespace zeroth
