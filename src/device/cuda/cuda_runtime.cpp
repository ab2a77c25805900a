#include "device/cuda/cuda_runtime.h"

#include "device/polling.h"

#include <zeroth/base/error.h>
#include <zeroth/base/interrupt.h>

#include <deque>
#include <string>
#include <utility>

namespace zeroth::detail {
namespace {

constexpr std::string_view kRuntime = "device.cuda";

class CudaRuntime final : public StreamRuntime {
 public:
  CudaRuntime(const CudaTable& cuda, int device, Milliseconds timeout)
      : cuda_(cuda),
        device_(device),
        timeout_(timeout),
        events_(std::make_shared<EventCache>(cuda, device, std::string(kRuntime))) {}

  int add_stream() override {
    const CudaDeviceScope scope(cuda_, device_, kRuntime);
    void* stream = nullptr;
    // One that does not wait for the legacy default stream, which waits for everything.
    check_cuda(cuda_, cuda_.stream_create(&stream, kCudaStreamNonBlocking), "a stream", kRuntime);
    streams_.push_back({stream, nullptr});
    return static_cast<int>(streams_.size()) - 1;
  }

  void enqueue(int stream, std::function<void()> task) override {
    guarded(stream, [&] {
      ZR_CHECK(!closed_, ErrorCode::kAborted, "the device was closed before this work ran",
               {.where = std::string(kRuntime)});
      const CudaDeviceScope scope(cuda_, device_, kRuntime);
      task();
    });
  }

  std::shared_ptr<Completion> record(int stream) override {
    auto completion = std::make_shared<Completion>();
    completion->source = shared_from_this();
    guarded(stream, [&] {
      ZR_CHECK(!closed_, ErrorCode::kAborted, "the device was closed before this work ran",
               {.where = std::string(kRuntime)});
      completion->native = events_->take();
      const CudaDeviceScope scope(cuda_, device_, kRuntime);
      check_cuda(cuda_, cuda_.event_record(completion->native.get(), at(stream).native), "to record an event",
                 kRuntime);
    });
    completion->error = std::exchange(at(stream).error, nullptr);
    completion->done = completion->error != nullptr;
    return completion;
  }

  void order_after(int stream, std::shared_ptr<Completion> completion) override {
    if (!completion->native) finish_foreign(*this, *completion);
    if (completion->error) {
      if (!at(stream).error) at(stream).error = completion->error;
      return;
    }
    if (completion->done) return;
    guarded(stream, [&] {
      const CudaDeviceScope scope(cuda_, device_, kRuntime);
      check_cuda(cuda_, cuda_.stream_wait_event(at(stream).native, completion->native.get(), 0),
                 "to order a stream after an event", kRuntime);
    });
  }

  void run_until(Completion& completion) override {
    const Deadline deadline(timeout_);
    while (!completion.done) {
      try {
        completion.done =
            poll_for(deadline.slice(), [&] { return event_happened(cuda_, completion.native.get(), kRuntime); });
      } catch (...) {
        completion.error = std::current_exception();
        completion.done = true;
        return;
      }
      if (completion.done) return;
      check_interrupt();
      ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout,
               "the device did not come to the end of its work within " + std::to_string(timeout_.count()) + " ms",
               {.where = std::string(kRuntime),
                .who = "device " + std::to_string(device_),
                .expected = "an event of a stream",
                .hint = "a kernel that never ends, or one that waits for a rank that does not come"});
    }
  }

  bool ready(Completion& completion) override {
    if (!completion.done) completion.done = cuda_.event_query(completion.native.get()) == kCudaSuccess;
    return completion.done;
  }

  void close() noexcept override {
    closed_ = true;
    // The driver lets what runs in them come to its end.
    for (Queue& queue : streams_) {
      if (queue.native != nullptr) (void)cuda_.stream_destroy(std::exchange(queue.native, nullptr));
    }
  }

  bool runs_inline() const override { return false; }
  void* native_stream(int stream) const override { return streams_[static_cast<std::size_t>(stream)].native; }

 private:
  struct Queue {
    void* native = nullptr;
    std::exception_ptr error;
  };

  Queue& at(int stream) { return streams_[static_cast<std::size_t>(stream)]; }

  /// Nothing runs behind a failure until it has been recorded, as in the other modes.
  template <class Body>
  void guarded(int stream, const Body& body) {
    if (at(stream).error) return;
    try {
      body();
    } catch (...) {
      at(stream).error = std::current_exception();
    }
  }

  const CudaTable& cuda_;
  const int device_;
  const Milliseconds timeout_;
  std::shared_ptr<EventCache> events_;
  std::deque<Queue> streams_;
  bool closed_ = false;
};

}  // namespace

std::shared_ptr<StreamRuntime> make_cuda_runtime(const CudaTable& cuda, int device, Milliseconds timeout) {
  return std::make_shared<CudaRuntime>(cuda, device, timeout);
}

bool event_happened(const CudaTable& cuda, void* event, std::string_view where) {
  const CudaStatus status = cuda.event_query(event);
  if (status == kCudaNotReady) return false;
  check_cuda(cuda, status, "to finish what was given to it", where);
  return true;
}

}  // namespace zeroth::detail
