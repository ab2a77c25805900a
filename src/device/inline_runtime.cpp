#include "device/stream_runtime.h"

#include <deque>
#include <utility>

namespace zeroth::detail {
namespace {

/// Tasks run at once on the caller's thread. A failed stream stays failed until its error has been recorded once.
class InlineRuntime final : public StreamRuntime {
 public:
  explicit InlineRuntime(InlineKind kind) : kind_(kind) {}

  int add_stream() override {
    errors_.emplace_back();
    return static_cast<int>(errors_.size()) - 1;
  }

  void enqueue(int stream, std::function<void()> task) override {
    std::exception_ptr& error = errors_[static_cast<std::size_t>(stream)];
    if (error) return;  // nothing runs behind a failure, exactly as in the other modes
    try {
      task();
    } catch (...) {
      error = std::current_exception();
    }
  }

  std::shared_ptr<Completion> record(int stream) override {
    std::exception_ptr& error = errors_[static_cast<std::size_t>(stream)];
    if (!error) return nullptr;
    auto completion = std::make_shared<Completion>();
    completion->source = shared_from_this();
    completion->done = true;
    completion->error = std::exchange(error, nullptr);
    return completion;
  }

  void order_after(int stream, std::shared_ptr<Completion> completion) override {
    if (kind_ == InlineKind::kOutermost) finish_foreign(*this, *completion);
    if (completion->error && !errors_[static_cast<std::size_t>(stream)]) {
      errors_[static_cast<std::size_t>(stream)] = completion->error;
    }
  }

  void run_until(Completion& /*completion*/) override {}
  bool runs_inline() const override { return true; }

 private:
  InlineKind kind_;
  std::deque<std::exception_ptr> errors_;  // references stay valid while a task makes a further stream
};

}  // namespace

std::shared_ptr<StreamRuntime> make_inline_runtime(InlineKind kind) {
  return std::make_shared<InlineRuntime>(kind);
}

}  // namespace zeroth::detail
