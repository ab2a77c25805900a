#include "comm/decorators/faulty_backend.h"

#include <zeroth/comm/decorators.h>

#include <thread>
#include <utility>

namespace zeroth {

FaultyBackend::FaultyBackend(std::unique_ptr<CommBackend> inner, FaultPlan plan)
    : ForwardingBackend(std::move(inner)),
      plan_(plan),
      state_(plan.seed * 0x9e3779b97f4a7c15U + static_cast<std::uint64_t>(rank()) + 1) {}

Work FaultyBackend::submit(std::span<const Collective> collectives, const Stream& stream) {
  const std::optional<std::vector<Collective>> rest = trouble(collectives);
  return inner().submit(rest ? std::span<const Collective>(*rest) : collectives, stream);
}

std::unique_ptr<PendingPoints> FaultyBackend::start(std::span<const Collective> points, const Stream& stream) {
  const std::optional<std::vector<Collective>> rest = trouble(points);
  return inner().start(rest ? std::span<const Collective>(*rest) : points, stream);
}

std::optional<std::vector<Collective>> FaultyBackend::trouble(std::span<const Collective> collectives) {
  const std::int64_t first = calls_;
  calls_ += static_cast<std::int64_t>(collectives.size());
  const auto hits = [&](std::int64_t call) { return call >= first && call < calls_; };
  maybe_delay();
  if (hits(plan_.freeze_at_call)) std::this_thread::sleep_for(plan_.freeze);
  if (hits(plan_.fail_at_call)) {
    throw Error(ErrorCode::kInternal, "planted failure",
                {.where = "comm.faulty",
                 .who = "rank " + std::to_string(rank()) + "/" + std::to_string(size()),
                 .which = describe(collectives[static_cast<std::size_t>(plan_.fail_at_call - first)])});
  }
  if (!hits(plan_.drop_call)) return std::nullopt;
  std::vector<Collective> rest(collectives.begin(), collectives.end());
  rest.erase(rest.begin() + (plan_.drop_call - first));
  return rest;
}

std::unique_ptr<CommBackend> FaultyBackend::split(int color, int key, std::string_view name) {
  std::unique_ptr<CommBackend> part = inner().split(color, key, name);
  if (!part) return nullptr;
  return std::make_unique<FaultyBackend>(std::move(part), plan_);
}

void FaultyBackend::wait_until(const std::function<bool()>& predicate, const WaitContext& context) {
  maybe_delay();
  inner().wait_until(predicate, context);
}

void FaultyBackend::notify() {
  maybe_delay();
  inner().notify();
}

/// xorshift64*: a few bits of luck without the standard library's state of 2.5 KiB.
void FaultyBackend::maybe_delay() {
  if (plan_.delay_probability <= 0) return;
  const auto next = [this] {
    state_ ^= state_ >> 12U;
    state_ ^= state_ << 25U;
    state_ ^= state_ >> 27U;
    return state_ * 0x2545f4914f6cdd1dU >> 11U;
  };
  if (static_cast<double>(next()) * 0x1p-53 >= plan_.delay_probability) return;
  const auto longest = static_cast<std::uint64_t>(plan_.max_delay.count()) + 1;
  std::this_thread::sleep_for(std::chrono::microseconds(next() % longest));
}

}  // namespace zeroth
