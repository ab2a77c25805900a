#include "device/stream_runtime.h"

#include <zeroth/device/stream.h>

#include <utility>

namespace zeroth {

namespace detail {

void finish_foreign(const StreamRuntime& runtime, Completion& completion) {
  if (completion.done || completion.source.get() == &runtime) return;
  try {
    completion.source->run_until(completion);
  } catch (...) {
    completion.error = std::current_exception();
    completion.done = true;
  }
}

}  // namespace detail

bool Event::ready() const {
  return !completion_ || completion_->done || completion_->source->ready(*completion_);
}

void Event::wait() const {
  if (!completion_) return;
  if (!completion_->done) completion_->source->run_until(*completion_);
  if (completion_->error) std::rethrow_exception(completion_->error);
}

Stream::Stream(std::shared_ptr<detail::StreamRuntime> runtime, int index, std::string name)
    : runtime_(std::move(runtime)), index_(index), name_(std::move(name)) {}

void Stream::enqueue(std::function<void()> task) const {
  runtime_->enqueue(index_, std::move(task));
}

Event Stream::record() const {
  return Event(runtime_->record(index_));
}

void Stream::order_after(const Event& event) const {
  if (event.completion_) runtime_->order_after(index_, event.completion_);
}

void Stream::synchronize() const {
  record().wait();
}

bool Stream::runs_inline() const {
  return runtime_->runs_inline();
}

void* Stream::native() const {
  return runtime_ ? runtime_->native_stream(index_) : nullptr;
}

}  // namespace zeroth
