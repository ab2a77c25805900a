#include "comm/decorators/slow_link_backend.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/interrupt.h>
#include <zeroth/comm/decorators.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>

namespace zeroth {

/// Counts what comes from other nodes, on its way to who watches; and makes its receiver wait.
class SlowLinkBackend::Link final : public TrafficObserver {
 public:
  explicit Link(LinkSpeed speed) : speed_(speed) {}

  void observe(const TrafficEvent& event) noexcept override {
    const std::lock_guard lock(mutex_);
    if (event.kind == CollectiveKind::kRecv) {
      if (event.far_bytes > 0) points_until_ = carry(event.far_bytes);
    } else {
      far_bytes_ += event.far_bytes;
    }
    if (watcher_) watcher_->observe(event);
  }
  void set_watcher(std::shared_ptr<TrafficObserver> watcher) {
    const std::lock_guard lock(mutex_);
    watcher_ = std::move(watcher);
  }

  /// Sleeps until the link has carried all that has come by other calls than messages between two ranks.
  void wait() {
    SteadyClock::time_point until{};
    {
      const std::lock_guard lock(mutex_);
      const std::uint64_t bytes = std::exchange(far_bytes_, 0);
      if (bytes == 0) return;
      until = carry(bytes);
    }
    sleep_until(until);
  }

  /// When it has carried all messages that have come.
  [[nodiscard]] SteadyClock::time_point points_until() {
    const std::lock_guard lock(mutex_);
    return points_until_;
  }

  static void sleep_until(SteadyClock::time_point until) {
    for (;;) {
      const auto left = until - SteadyClock::now();
      if (left <= SteadyClock::duration::zero()) return;
      std::this_thread::sleep_for(std::min<SteadyClock::duration>(left, kWaitSlice));
      check_interrupt();
    }
  }

 private:
  /// Under mutex_: until when.
  SteadyClock::time_point carry(std::uint64_t bytes) {
    const auto time_of = [&](double amount) {
      return std::chrono::duration_cast<SteadyClock::duration>(
          std::chrono::duration<double>(speed_.bytes_per_second > 0 ? amount / speed_.bytes_per_second : 0));
    };
    const auto now = SteadyClock::now();
    free_at_ = std::max(free_at_, now - time_of(static_cast<double>(speed_.burst_bytes))) +
               time_of(static_cast<double>(bytes));
    return std::max(free_at_, now) + speed_.latency;
  }

  LinkSpeed speed_;
  SteadyClock::time_point
      free_at_{};  ///< when it will have carried what it was given; a new one has been idle for long
  std::mutex mutex_;
  std::uint64_t far_bytes_ = 0;
  SteadyClock::time_point points_until_{};
  std::shared_ptr<TrafficObserver> watcher_;
};

/// Done when the link has carried what the group below has received.
class SlowLinkBackend::SlowPoints final : public PendingPoints {
 public:
  SlowPoints(std::unique_ptr<PendingPoints> points, std::shared_ptr<Link> link)
      : points_(std::move(points)), link_(std::move(link)) {}

  bool done() override {
    if (points_ && points_->done()) come();
    return !points_ && SteadyClock::now() >= until_;
  }
  void wait() override {
    if (points_) {
      points_->wait();
      come();
    }
    Link::sleep_until(until_);
  }

 private:
  void come() {
    until_ = link_->points_until();
    points_.reset();
  }

  std::unique_ptr<PendingPoints> points_;  // null: they have come
  std::shared_ptr<Link> link_;
  SteadyClock::time_point until_{};
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
  const bool points = std::ranges::any_of(collectives, [](const auto& call) { return is_point_to_point(call.kind); });
  stream.enqueue([link = link_, points] {
    link->wait();
    if (points) Link::sleep_until(link->points_until());
  });
  return {stream.record(), work.info()};
}

std::unique_ptr<PendingPoints> SlowLinkBackend::start(std::span<const Collective> points, const Stream& stream) {
  return std::make_unique<SlowPoints>(inner().start(points, stream), link_);
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
