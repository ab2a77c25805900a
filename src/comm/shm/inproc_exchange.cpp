#include "comm/shm/inproc_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace zeroth {

std::shared_ptr<InprocHub> make_inproc_hub(int world_size) {
  ZR_CHECK(world_size >= 1, ErrorCode::kUsage, "a world has at least one rank", {.where = "comm.inproc"});
  return std::make_shared<InprocHub>(world_size);
}

void InprocHub::claim(int rank) {
  const std::lock_guard lock(mutex_);
  const auto index = static_cast<std::size_t>(rank);
  ZR_CHECK(!claimed_[index], ErrorCode::kMismatch, fmt::format("rank {} came twice", rank),
           {.where = "comm.inproc", .hint = "every thread needs its own rank; a hub serves one world"});
  claimed_[index] = true;
}

std::vector<detail::SharedSpan> InprocHub::gather(const std::string& key, int rank, int size, detail::SharedSpan item,
                                                  detail::FunctionRef<void()> check) {
  std::unique_lock lock(mutex_);
  Meeting& meeting = meetings_[key];
  if (meeting.items.empty()) meeting.items.resize(static_cast<std::size_t>(size));
  meeting.items[static_cast<std::size_t>(rank)] = std::move(item);
  ++meeting.arrived;
  changed_.notify_all();
  while (meeting.arrived < size) {
    changed_.wait_until(lock, SteadyClock::now() + kWaitSlice / 5);
    if (meeting.arrived < size) check();
  }
  std::vector<detail::SharedSpan> all;
  for (const auto& entry : meeting.items) all.push_back(*entry);
  if (++meeting.left == size) meetings_.erase(key);
  return all;
}

namespace detail {

InprocExchange::InprocExchange(std::shared_ptr<InprocHub> hub, std::string token, int rank, int size)
    : hub_(std::move(hub)), token_(std::move(token)), rank_(rank), size_(size) {}

std::vector<SharedSpan> InprocExchange::exchange(const Arena& arena, FunctionRef<void()> check) {
  const SharedSpan own{.bytes = {arena.data(), arena.capacity()}, .keep = arena.keep_alive()};
  return hub_->gather(fmt::format("{}#{}", token_, meetings_++), rank_, size_, own, check);
}

std::unique_ptr<SegmentExchange> InprocExchange::split(const SubgroupSpec& spec, FunctionRef<void()> /*check*/) {
  return std::make_unique<InprocExchange>(hub_, token_ + "/" + spec.token, spec.rank,
                                          static_cast<int>(spec.members.size()));
}

std::unique_ptr<Liveness> InprocExchange::watch(const std::vector<JobControl*>& /*controls*/) {
  return nullptr;
}

}  // namespace detail
}  // namespace zeroth
