// Makes links between nodes slow.
#pragma once

#include <zeroth/comm/decorators.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace zeroth {

/// The link of one rank to other nodes.
struct LinkSpeed {
  double bytes_per_second = 0;                       ///< received; 0: no limit
  std::chrono::microseconds latency{0};              ///< once a call that receives something
  std::size_t burst_bytes = std::size_t{64} << 10U;  ///< what a link that was idle takes at once
};

/// Emulates slow links between nodes on one machine, virtual nodes included (CommOptions::nodes): whoever receives
/// bytes from another node sleeps as long as they would have taken. A token bucket a rank; parts made by split() share
/// it. The link carries a message between two ranks from the moment when it has come here, so a started one beside what
/// the rank does then: nobody sleeps for it before somebody waits.
class SlowLinkBackend final : public ForwardingBackend {
 public:
  SlowLinkBackend(std::unique_ptr<CommBackend> inner, LinkSpeed speed);
  Work submit(std::span<const Collective> collectives, const Stream& stream) override;
  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points, const Stream& stream) override;
  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override;
  void count_one_sided(CollectiveKind kind, int peer, std::uint64_t bytes) override;
  void set_observer(std::shared_ptr<TrafficObserver> observer) override;

 private:
  class Link;
  class SlowPoints;
  SlowLinkBackend(std::unique_ptr<CommBackend> inner, std::shared_ptr<Link> link);
  std::shared_ptr<Link> link_;
};

}  // namespace zeroth
