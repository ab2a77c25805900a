#include <zeroth/base/text.h>
#include <zeroth/comm/decorators.h>

#include <fmt/format.h>

#include <utility>

namespace zeroth {

TrafficRow& TrafficRow::operator+=(const TrafficRow& other) {
  calls += other.calls;
  bytes += other.bytes;
  one_sided_calls += other.one_sided_calls;
  one_sided_bytes += other.one_sided_bytes;
  far_bytes += other.far_bytes;
  return *this;
}

void TrafficTable::observe(const TrafficEvent& event) noexcept {
  const std::lock_guard lock(mutex_);
  auto group = groups_.find(event.group);
  if (group == groups_.end()) group = groups_.emplace(std::string(event.group), Rows{}).first;
  TrafficRow& row = group->second[static_cast<std::size_t>(event.kind)];
  row += event.one_sided
             ? TrafficRow{.one_sided_calls = event.calls, .one_sided_bytes = event.bytes, .far_bytes = event.far_bytes}
             : TrafficRow{.calls = event.calls, .bytes = event.bytes, .far_bytes = event.far_bytes};
  control_bytes_ += event.control_bytes;
}

TrafficRow TrafficTable::row(std::string_view group, CollectiveKind kind) const {
  const std::lock_guard lock(mutex_);
  const auto found = groups_.find(group);
  return found == groups_.end() ? TrafficRow{} : found->second[static_cast<std::size_t>(kind)];
}

TrafficRow TrafficTable::row(CollectiveKind kind) const {
  const std::lock_guard lock(mutex_);
  TrafficRow sum;
  for (const auto& [name, rows] : groups_) sum += rows[static_cast<std::size_t>(kind)];
  return sum;
}

std::uint64_t TrafficTable::bytes() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t sum = 0;
  for (const auto& [name, rows] : groups_) {
    for (const TrafficRow& row : rows) sum += row.bytes + row.one_sided_bytes;
  }
  return sum;
}

std::uint64_t TrafficTable::far_bytes() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t sum = 0;
  for (const auto& [name, rows] : groups_) {
    for (const TrafficRow& row : rows) sum += row.far_bytes;
  }
  return sum;
}

std::uint64_t TrafficTable::control_bytes() const {
  const std::lock_guard lock(mutex_);
  return control_bytes_;
}

std::string TrafficTable::text() const {
  const std::lock_guard lock(mutex_);
  std::string lines;
  for (const auto& [name, rows] : groups_) {
    for (std::size_t kind = 0; kind < rows.size(); ++kind) {
      const TrafficRow& row = rows[kind];
      if (row == TrafficRow{}) continue;
      lines += fmt::format("{:<12} {:<14} {:>8} calls {:>12}   one-sided {:>8} copies {:>12}   between nodes {:>12}\n",
                           name, name_of(static_cast<CollectiveKind>(kind)), row.calls, format_bytes(row.bytes),
                           row.one_sided_calls, format_bytes(row.one_sided_bytes), format_bytes(row.far_bytes));
    }
  }
  return lines;
}

void TrafficTable::reset() {
  const std::lock_guard lock(mutex_);
  groups_.clear();
  control_bytes_ = 0;
}

void TrafficTable::reset(std::string_view group) {
  const std::lock_guard lock(mutex_);
  if (const auto found = groups_.find(group); found != groups_.end()) groups_.erase(found);
}

CountingBackend::CountingBackend(std::unique_ptr<CommBackend> inner, std::shared_ptr<TrafficTable> table)
    : ForwardingBackend(std::move(inner)), table_(std::move(table)) {
  this->inner().set_observer(table_);
}

std::unique_ptr<CommBackend> CountingBackend::split(int color, int key, std::string_view name) {
  std::unique_ptr<CommBackend> part = inner().split(color, key, name);
  if (!part) return nullptr;
  return std::make_unique<CountingBackend>(std::move(part), table_);
}

}  // namespace zeroth
