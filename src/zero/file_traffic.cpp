#include <zeroth/offload/stores.h>
#include <zeroth/zero/file_traffic.h>
#include <zeroth/zero/memory_plan.h>

#include <algorithm>
#include <vector>

namespace zeroth {
namespace {

std::uint64_t in_files(const StateBlock& block) {
  return block.in_files ? align_up(block.bytes, kIoAlignment) : 0;
}

/// Parts of the block that are updated apart: they end where the block, the update range or a block of the states ends.
std::uint64_t updated_parts(const StateBlock& block, const Range& updated, std::span<const StateBlock> states) {
  const Range own = intersect(block.range, updated);
  if (own.size() == 0) return 0;
  const auto parts = std::ranges::count_if(states, [&](const StateBlock& other) {
    return other.flat == block.flat && intersect(other.range, own).size() > 0;
  });
  return static_cast<std::uint64_t>(std::max<std::ptrdiff_t>(parts, 1));
}

}  // namespace

FileTraffic plan_file_traffic(const ModelLayout& model, const ShardingPlan& plan, int rank,
                              std::span<const StateDeclaration> states, int micro_steps, BlockSet set,
                              std::span<const int> gathers, int passes) {
  const auto in_all = static_cast<std::uint64_t>(passes);
  const std::vector<StateRow> rows = state_table(model, plan, rank, states, micro_steps);
  const std::vector<StateBlock> of_updates = state_blocks(rows, plan.residency, BlockSet::kUpdates);
  FileTraffic traffic;
  if (set == BlockSet::kUpdates) {
    for (const StateBlock& block : of_updates) traffic += {in_files(block) * in_all, in_files(block) * in_all};
    return traffic;
  }
  const Degrees degrees = plan.degrees(model.world);
  for (const StateBlock& block : state_blocks(rows, plan.residency, set)) {
    const FlatLayout& flat = model.flat(block.flat);
    const std::uint64_t bytes = in_files(block);
    traffic.read_bytes += bytes * planned_gathers(model, plan, flat.unit, micro_steps, gathers);
    if (!flat.trainable) continue;
    const Range updated = flat.part(rank, degrees.optimizer);
    const std::uint64_t parts = updated_parts(block, updated, of_updates);
    traffic += {bytes * parts * in_all, bytes * parts * in_all};
    if (degrees.optimizer == degrees.parameter) continue;
    if (parts > 0) traffic.read_bytes += bytes;
    traffic.write_bytes += bytes;
  }
  return traffic;
}

}  // namespace zeroth
