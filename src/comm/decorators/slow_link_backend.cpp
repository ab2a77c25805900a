#include "comm/decorators/slow_link_backend.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/interrupt.h>
#include <zeroth/comm/decorators.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

namespace zeroth {

/// Counts what comes from other nodes, on its way to who watches; and makes its receiver wait.
class SlowLinkBackend::Link final : public TrafficObserver {
 public:
  explicit Link(LinkSpeed speed) : speed_(speed) {}

  void observe(const TrafficEvent& event) noexcept override {
    far_bytes_ += event.far_bytes;
    const std::lock_guard lock(mutex_);
    if (watcher_) watcher_->observe(event);
  }
  void set_watcher(std::shared_ptr<TrafficObserver> watcher) {
    const std::lock_guard lock(mutex_);
    watcher_ = std::move(watcher);
  }

  /// Sleeps until the link has carried all that has come.
  void wait() {
    const std::uint64_t bytes = far_bytes_.exchange(0);
    if (bytes == 0) return;
    const auto time_of = [&](double amount) {
      return std::chrono::duration_cast<SteadyClock::duration>(
          std::chrono::duration<double>(speed_.bytes_per_second > 0 ? amount / speed_.bytes_per_second : 0));
    };
    const auto now = SteadyClock::now();
    free_at_ = std::max(free_at_, now - time_of(static_cast<double>(speed_.burst_bytes))) +
               time_of(static_cast<double>(bytes));
    const auto until = std::max(free_at_, now) + speed_.latency;
    for (;;) {
      const auto left = until - SteadyClock::now();
      if (left <= SteadyClock::duration::zero()) return;
      std::this_thread::sleep_for(std::min<SteadyClock::duration>(left, kWaitSlice));
      check_interrupt();
    }
  }

 private:
  LinkSpeed speed_;
  SteadyClock::time_point
      free_at_{};  ///< when it will have carried what it was given; a new one has been idle for long
  std::atomic<std::uint64_t> far_bytes_ = 0;
  std::mutex mutex_;
  std::shared_ptr<TrafficObserver> watcher_;
};

SlowLinkBackend::SlowLinkBackend(std::unique_ptr<CommBackend> inner, LinkSpeed speed)
    : SlowLinkBackend(std::move(inner), std::make_shared<Link>(speed)) {}

SlowLinkBackend::SlowLinkBackend(std::unique_ptr<CommBackend> inner, std::shared_ptr<Link> link)
    : ForwardingBackend(std::move(inner)), link_(std::move(link)) {
  this->inner().set_observer(link_);
}

Work SlowLinkBackend::submit(std::span<const Collective> collectives, const Stream& stream) {
  const Work work = inner().submit(collectives, stream);
  work.order_before(stream);  // an error is the stream's again
  stream.enqueue([link = link_] { link->wait(); });
  return {stream.record(), work.info()};
}

std::unique_ptr<CommBackend> SlowLinkBackend::split(int color, int key, std::string_view name) {
  std::unique_ptr<CommBackend> part = inner().split(color, key, name);
  if (!part) return nullptr;
  return std::unique_ptr<CommBackend>(new SlowLinkBackend(std::move(part), link_));
}

void SlowLinkBackend::count_one_sided(CollectiveKind kind, int peer, std::uint64_t bytes) {
  inner().count_one_sided(kind, peer, bytes);
  link_->wait();
}

void SlowLinkBackend::set_observer(std::shared_ptr<TrafficObserver> observer) {
  link_->set_watcher(std::move(observer));
}

}  // namespace zeroth
