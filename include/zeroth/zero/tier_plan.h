// The memory and the files of a plan, by state and tier. A pure function of the layout, as plan_memory().
#pragma once

#include <zeroth/device/memory.h>
#include <zeroth/zero/memory_plan.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace zeroth {

/// Bytes on each tier. Device and host together are plan_memory(): on ranks of a CPU both lie in its memory, and say
/// what rests where it is updated and what rests beside.
struct TierBytes {
  std::uint64_t device = 0;  ///< where states are updated and the model computes
  std::uint64_t host = 0;    ///< states that rest in host memory; blocks on their way, and those in a cache
  std::uint64_t files = 0;   ///< rounded as files are

  TierBytes& operator+=(const TierBytes& other) {
    device += other.device;
    host += other.host;
    files += other.files;
    return *this;
  }
  bool operator==(const TierBytes&) const = default;
};

/// By MemoryState. What an update needs in blocks is under kOptimizer, masters too: they lie together.
struct TierTable {
  std::array<TierBytes, kNumMemoryStates> rows{};

  [[nodiscard]] TierBytes total() const;
  TierTable& operator+=(const TierTable& other);
  bool operator==(const TierTable&) const = default;
};

[[nodiscard]] TierTable plan_tiers(const ModelLayout& model, const ShardingPlan& plan, int rank,
                                   std::span<const StateDeclaration> states, int micro_steps, std::size_t stripe_bytes);

/// Lines of equal width: a head, a line a state that has bytes, the sums. No trailing newline.
[[nodiscard]] std::string to_text(const TierTable& table);

}  // namespace zeroth
