// Reports of bytes received from other ranks. Backends report at the copy, never from a plan.
#pragma once

#include <zeroth/comm/collective.h>

#include <cstdint>
#include <string_view>

namespace zeroth {

struct TrafficEvent {
  std::string_view group{};
  CollectiveKind kind = CollectiveKind::kBarrier;
  bool one_sided = false;
  std::uint64_t calls = 0;          ///< 1 for the first event of a call, else 0
  std::uint64_t bytes = 0;          ///< payload received from other ranks
  std::uint64_t far_bytes = 0;      ///< of these from ranks on other nodes
  std::uint64_t control_bytes = 0;  ///< descriptions of calls read from other ranks
};

/// Called on the copying thread; must not block or throw. Parts of a split group use the observer of the group.
class TrafficObserver {
 public:
  TrafficObserver() = default;
  TrafficObserver(const TrafficObserver&) = delete;
  TrafficObserver& operator=(const TrafficObserver&) = delete;
  virtual ~TrafficObserver() = default;

  virtual void observe(const TrafficEvent& event) noexcept = 0;
};

}  // namespace zeroth
