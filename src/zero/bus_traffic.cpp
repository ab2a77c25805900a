#include <zeroth/zero/bus_traffic.h>
#include <zeroth/zero/memory_plan.h>
#include <zeroth/zero/state_table.h>

namespace zeroth {
namespace {

/// Of the update of a flat.
BusTraffic update_traffic(const FlatLayout& flat, const ShardingPlan& plan, int rank, const Degrees& degrees,
                          bool leave) {
  const ResidencyPlan& residency = plan.residency;
  const std::int64_t updated = flat.part(rank, degrees.optimizer).size();
  const std::uint64_t param = array_bytes(updated, flat.dtype);
  const std::uint64_t sums = array_bytes(updated, flat.accumulation());
  const bool beside = residency.in_blocks(residency.parameter);
  BusTraffic traffic;
  if (!residency.updates_cross_bus()) {
    if (leave) traffic.up += sums;
    if (beside) traffic += {.down = param, .up = param};
    return traffic;
  }
  if (!leave) traffic.down += array_bytes(updated, dtype_of_sums(plan, flat.dtype, flat.accumulation()));
  if (beside) return traffic;
  return traffic += {.down = master_of(flat.dtype) == Master::kWhole ? 0 : param, .up = param};
}

}  // namespace

BusTraffic plan_bus_traffic(const ModelLayout& model, const ShardingPlan& plan, int rank, int micro_steps,
                            std::span<const int> gathers) {
  BusTraffic traffic;
  const ResidencyPlan& residency = plan.residency;
  if (!residency.beside_device) return traffic;
  const Degrees degrees = plan.degrees(model.world);
  const bool leave = plan.sums_leave_device(model.world);
  const std::uint64_t events =
      plan.policy == ReductionPolicy::kPerMicroStep ? static_cast<std::uint64_t>(micro_steps) : 1;
  for (const FlatLayout& flat : model.flats) {
    const bool beside = residency.in_blocks(residency.parameter);
    const std::uint64_t at_rest = array_bytes(flat.part(rank, degrees.parameter).size(), flat.dtype);
    if (beside) traffic.up += at_rest * planned_gathers(model, plan, flat.unit, micro_steps, gathers);
    if (!flat.trainable) continue;
    if (leave) traffic.down += events * array_bytes(flat.part(rank, degrees.gradient).size(), flat.accumulation());
    traffic += update_traffic(flat, plan, rank, degrees, leave);
    if (beside && degrees.optimizer != degrees.parameter)
      traffic += {.down = at_rest, .up = array_bytes(flat.part(rank, degrees.optimizer).size(), flat.dtype)};
  }
  return traffic;
}

}  // namespace zeroth
