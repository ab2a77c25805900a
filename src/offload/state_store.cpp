#include <zeroth/offload/state_store.h>

#include <iterator>

namespace zeroth {
namespace {

constexpr std::uint64_t StoreCounters::* kSums[] = {
    &StoreCounters::leases,        &StoreCounters::reads,
    &StoreCounters::writes,        &StoreCounters::read_bytes,
    &StoreCounters::write_bytes,   &StoreCounters::prefetched,
    &StoreCounters::late,          &StoreCounters::on_demand,
    &StoreCounters::wait_ns,       &StoreCounters::slot_hits,
    &StoreCounters::needed_bytes,  &StoreCounters::spared_read_bytes,
    &StoreCounters::changed_bytes, &StoreCounters::spared_write_bytes,
    &StoreCounters::unused_bytes,
};
static_assert(sizeof(StoreCounters) == (std::size(kSums) + 1) * sizeof(std::uint64_t), "a counter is not in the list");

}  // namespace

StoreCounters& StoreCounters::operator+=(const StoreCounters& other) {
  for (const auto counter : kSums) this->*counter += other.*counter;
  ahead_bytes += other.ahead_bytes;
  return *this;
}

StoreCounters StoreCounters::since(const StoreCounters& before) const {
  StoreCounters change = *this;
  for (const auto counter : kSums) change.*counter -= before.*counter;
  return change;
}

}  // namespace zeroth
