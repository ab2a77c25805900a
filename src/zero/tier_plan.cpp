#include "zero/coded_calls.h"

#include <zeroth/base/text.h>
#include <zeroth/offload/stores.h>
#include <zeroth/zero/state_table.h>
#include <zeroth/zero/tier_plan.h>

#include <cstdio>
#include <string_view>
#include <vector>

namespace zeroth {
namespace {

std::string line(std::string_view name, const std::string& device, const std::string& host, const std::string& files) {
  std::array<char, 128> text{};
  std::snprintf(text.data(), text.size(), "  %-12.*s %12s %12s %12s", static_cast<int>(name.size()), name.data(),
                device.c_str(), host.c_str(), files.c_str());
  return text.data();
}

std::string line(std::string_view name, const TierBytes& bytes) {
  return line(name, format_bytes(bytes.device), format_bytes(bytes.host), format_bytes(bytes.files));
}

}  // namespace

TierBytes TierTable::total() const {
  TierBytes sum;
  for (const TierBytes& row : rows) sum += row;
  return sum;
}

TierTable& TierTable::operator+=(const TierTable& other) {
  for (std::size_t state = 0; state < rows.size(); ++state) rows[state] += other.rows[state];
  return *this;
}

TierTable plan_tiers(const ModelLayout& model, const ShardingPlan& plan, int rank,
                     std::span<const StateDeclaration> states, int micro_steps, std::size_t stripe_bytes) {
  TierTable table;
  const auto row_of = [&table](MemoryState state) -> TierBytes& { return table.rows[static_cast<std::size_t>(state)]; };
  const std::vector<StateRow> rows = state_table(model, plan, rank, states, micro_steps);
  for (const StateRow& row : rows) {
    if (row.residency == Residency::kHost && !row.in_blocks) row_of(row.memory()).host += row.bytes();
  }
  for (const BlockSet set : kBlockSets) {
    std::vector<std::size_t> in_memory;
    std::vector<std::size_t> in_files;
    for (const StateBlock& block : state_blocks(rows, plan.residency, set))
      (block.in_files ? in_files : in_memory).push_back(block.bytes);
    row_of(memory_of_blocks(set)).host += memory_store_memory(in_memory);
    if (in_files.empty()) continue;
    row_of(memory_of_blocks(set)).files += file_store_bytes(in_files, {.stripe_bytes = stripe_bytes});
  }
  const MemorySnapshot memory = plan_memory(model, plan, rank, states, micro_steps);
  row_of(MemoryState::kStaging).host =
      memory[MemoryState::kStaging] - code_memory(model, plan, rank).messages() -
      static_cast<std::size_t>(plan.residency.slots) * bus_device_bytes(model, plan, rank);
  for (std::size_t state = 0; state < kNumMemoryStates; ++state)
    table.rows[state].device = memory.bytes[state] - table.rows[state].host;
  return table;
}

std::string to_text(const TierTable& table) {
  std::string text = line("state", "device", "host", "files");
  for (std::size_t state = 0; state < kNumMemoryStates; ++state) {
    if (table.rows[state] == TierBytes{}) continue;
    text += "\n" + line(name_of(static_cast<MemoryState>(state)), table.rows[state]);
  }
  return text + "\n" + line("sum", table.total());
}

}  // namespace zeroth
