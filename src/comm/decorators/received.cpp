#include <zeroth/comm/received.h>

#include <array>
#include <cstddef>

namespace zeroth {
namespace {

const CountingBackend* counting(const Communicator& group) {
  return dynamic_cast<const CountingBackend*>(&group.backend());
}

}  // namespace

std::map<std::string, TrafficRow> received_by_kind(const Communicator& group) {
  std::map<std::string, TrafficRow> rows;
  const CountingBackend* const backend = counting(group);
  if (backend == nullptr) return rows;
  for (std::size_t index = 0; index < kNumCollectiveKinds; ++index) {
    const auto kind = static_cast<CollectiveKind>(index);
    const TrafficRow row = backend->table().row(backend->group_name(), kind);
    if (row != TrafficRow{}) rows.emplace(name_of(kind), row);
  }
  return rows;
}

std::uint64_t received_bytes(const Communicator& group) {
  std::uint64_t bytes = 0;
  for (const auto& [kind, row] : received_by_kind(group)) bytes += row.bytes + row.one_sided_bytes;
  return bytes;
}

void reset_received(const Communicator& group) {
  if (const CountingBackend* const backend = counting(group)) backend->reset();
}

}  // namespace zeroth
