// Streams, events and works: the order of tasks, and waits for them.
//
// A Stream is an ordered queue of tasks. The execution mode of the device decides when a task runs:
//   inline  production on the CPU: at once, on the caller's thread (a thread hand-off costs 11-49 us)
//   chaos   tests: tasks wait in their queues and run in a seeded legal order, as late as an event, a wait or chance
//           allows. So every missing dependency gives wrong data for some seed
//   cuda    a task runs at once on the caller's thread and submits work to Stream::native(). That work runs later on
//   the
//           device. Streams order device work without the host; only Event::wait() blocks
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

/// A point in a stream. Copyable. An empty event is complete.
class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<detail::Completion> completion) : completion_(std::move(completion)) {}

  [[nodiscard]] bool ready() const;
  /// Blocks the host until all work before the point has run. In chaos mode it runs the needed tasks, and by chance
  /// more. Throws the exception of that work.
  void wait() const;

 private:
  friend class Stream;
  std::shared_ptr<detail::Completion> completion_;
};

/// An ordered queue of tasks. A copyable handle; one thread at a time.
class Stream {
 public:
  Stream() = default;
  Stream(std::shared_ptr<detail::StreamRuntime> runtime, int index, std::string name);

  /// Adds a task. It may run before this returns (inline) or later (chaos, CUDA). The task owns its captures.
  /// After an exception of a task, no task of the stream runs until the next record(). That event (or Work) carries the
  /// exception, every wait on it throws it, streams ordered after it fail too, and the stream itself continues. A task
  /// may enqueue tasks and wait for events of other streams. A task that it adds to its own stream runs in place in
  /// inline mode and after it in the other modes, so it must not wait for that task (chaos: kInternal).
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
  /// The device's own handle (a cudaStream_t); null if tasks run on the host. It lives as long as the device.
  [[nodiscard]] void* native() const;

 private:
  std::shared_ptr<detail::StreamRuntime> runtime_;
  int index_ = 0;
  std::string name_;
};

/// Description of a Work, for messages and traces.
struct WorkInfo {
  std::string what;
  std::uint64_t bytes = 0;
};

/// A submitted piece of work, to wait for or to order other work after. Its tasks own their captures until it is done.
class [[nodiscard]] Work {
 public:
  Work() = default;
  Work(Event event, WorkInfo info) : event_(std::move(event)), info_(std::move(info)) {}

  /// Blocks the host until the work is done. Throws the work's exception.
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
