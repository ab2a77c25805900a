// Breaks things on purpose, for tests.
#pragma once

#include <zeroth/comm/decorators.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace zeroth {

/// What goes wrong, and when. Probabilities are per matched call or wait; the same seed gives the same
/// faults. A started message is a matched call.
struct FaultPlan {
  std::uint64_t seed = 0;
  double delay_probability = 0;  ///< sleep up to max_delay before a matched call, a wait or a notify()
  std::chrono::microseconds max_delay{200};
  std::int64_t fail_at_call = -1;    ///< the matched call with this index throws kInternal "planted failure"
  std::int64_t drop_call = -1;       ///< the matched call with this index is not made
  std::int64_t freeze_at_call = -1;  ///< before this matched call the rank sleeps for `freeze`
  std::chrono::milliseconds freeze{0};
};

/// Delays, fails, drops, freezes; seeded.
class FaultyBackend final : public ForwardingBackend {
 public:
  FaultyBackend(std::unique_ptr<CommBackend> inner, FaultPlan plan);
  Work submit(std::span<const Collective> collectives, const Stream& stream) override;
  [[nodiscard]] std::unique_ptr<PendingPoints> start(std::span<const Collective> points, const Stream& stream) override;
  [[nodiscard]] std::unique_ptr<CommBackend> split(int color, int key, std::string_view name) override;
  void wait_until(const std::function<bool()>& predicate, const WaitContext& context) override;
  void notify() override;
  [[nodiscard]] std::int64_t calls() const { return calls_; }

 private:
  void maybe_delay();
  /// Before these calls; what is left of them where one is dropped, else nothing.
  [[nodiscard]] std::optional<std::vector<Collective>> trouble(std::span<const Collective> calls);

  FaultPlan plan_;
  std::uint64_t state_;
  std::int64_t calls_ = 0;
};

}  // namespace zeroth
