// SegmentExchange: how the ranks of one group hand each other memory. The engine above it is the same for
// threads and processes.
#pragma once

#include "comm/function_ref.h"
#include "comm/shm/peers.h"
#include "comm/shm/private_memory.h"

#include <zeroth/comm/backend.h>
#include <zeroth/comm/factory.h>

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::detail {

struct SharedSpan {
  std::span<std::byte> bytes{};
  std::shared_ptr<void> keep{};
};

/// A part of a group: who is in it, which of them this rank is, and a word that no other group of the job
/// has.
struct SubgroupSpec {
  std::vector<int> members{};  ///< ranks of the parent
  int rank = 0;                ///< index of this rank in members
  std::string token{};
};

class SegmentExchange {
 public:
  SegmentExchange() = default;
  SegmentExchange(const SegmentExchange&) = delete;
  SegmentExchange& operator=(const SegmentExchange&) = delete;
  virtual ~SegmentExchange() = default;

  [[nodiscard]] virtual std::string_view kind() const = 0;
  [[nodiscard]] virtual Capabilities capabilities() const = 0;
  /// Gives `arena` to everybody and gets everybody's. Every rank of the group calls it; blocks, and calls
  /// check() at least every 100 ms, which throws when waiting is pointless.
  [[nodiscard]] virtual std::vector<SharedSpan> exchange(const Arena& arena, FunctionRef<void()> check) = 0;
  [[nodiscard]] virtual std::unique_ptr<SegmentExchange> split(const SubgroupSpec& spec, FunctionRef<void()> check) = 0;
  /// What ranks can read of each other's own memory; null where they are threads.
  [[nodiscard]] virtual std::unique_ptr<PrivateMemory> private_memory() const { return nullptr; }
  /// Watches the ranks of the world, whose control blocks these are; null if they cannot die.
  [[nodiscard]] virtual std::unique_ptr<Liveness> watch(const std::vector<JobControl*>& controls) = 0;
};

}  // namespace zeroth::detail
