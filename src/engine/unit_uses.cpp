#include "engine/unit_uses.h"

#include <zeroth/base/error.h>
#include <zeroth/zero/memory_plan.h>

#include <algorithm>
#include <utility>

namespace zeroth {

UnitUses::UnitUses(const ModelLayout& model, const ShardingPlan& plan, ParameterStore& parameters)
    : model_(model), plan_(plan), parameters_(parameters), uses_(model.units.size()) {
  for (const ParamSpec& param : model_.params) expected_.push_back(param.trainable && param.numel() > 0);
  for (std::size_t unit = 0; unit < uses_.size(); ++unit) {
    for (const int param : model_.units[unit].params) {
      if (expected_[static_cast<std::size_t>(param)]) ++uses_[unit].trainable;
    }
    uses_[unit].seen.assign(model_.units[unit].params.size(), false);
  }
}

void UnitUses::pre_forward(int unit) {
  // Another way through the ring begins: what is kept for a backward yet to come gives its slot up and is gathered
  // again then.
  if (kept_in_ring_ >= 0 && kept_in_ring_ != unit && model_.units[static_cast<std::size_t>(unit)].repeated) {
    of(std::exchange(kept_in_ring_, -1)).kept.reset();
  }
  of(unit).forward.emplace_back(parameters_, unit);
}

void UnitUses::post_forward(int unit, bool awaits_backward) {
  const UnitSpec& spec = model_.units[static_cast<std::size_t>(unit)];
  Use& use = of(unit);
  ZR_CHECK(!use.forward.empty(), ErrorCode::kUsage, "post_forward without pre_forward",
           {.where = "engine", .which = "unit " + spec.name});
  UnshardLease lease = std::move(use.forward.back());
  use.forward.pop_back();
  if (!awaits_backward || use.kept || !keeps_gathered(model_, plan_, unit)) return;
  use.kept = std::move(lease);
  const bool shares_slot = plan_.reshard == Reshard::kDefault && plan_.gathers_parameters();
  if (shares_slot && spec.repeated) kept_in_ring_ = unit;
}

void UnitUses::drop_forward(int unit) noexcept {
  std::vector<UnshardLease>& leases = of(unit).forward;
  if (!leases.empty()) leases.pop_back();  // else release_all() was here first
}

void UnitUses::pre_backward(int unit) {
  Use& use = of(unit);
  if (!use.backward) use.backward = UnshardLease(parameters_, unit);
}

void UnitUses::post_backward(int unit) {
  Use& use = of(unit);
  use.kept.reset();
  use.backward.reset();
}

void UnitUses::keep(int unit) {
  Use& use = of(unit);
  if (!use.asked) use.asked = UnshardLease(parameters_, unit);
  ++use.num_asked;
}

void UnitUses::give_back(int unit) noexcept {
  Use& use = of(unit);
  if (use.num_asked == 0 || --use.num_asked > 0) return;
  use.asked.reset();
}

bool UnitUses::holds(int unit) const {
  const Use& use = of(unit);
  return !use.forward.empty() || use.kept || use.backward || use.asked;
}

void UnitUses::end_backward() {
  for (Use& use : uses_) {
    use.kept.reset();
    use.backward.reset();
    use.arrived = 0;
    use.seen.assign(use.seen.size(), false);
  }
}

void UnitUses::release_kept() {
  for (Use& use : uses_) use.kept.reset();
}

void UnitUses::release_all() {
  for (Use& use : uses_) {
    use.forward.clear();
    use.asked.reset();
    use.num_asked = 0;
    use.kept.reset();
    use.backward.reset();
  }
}

std::size_t UnitUses::position_in_unit(int param) const {
  const std::vector<int>& params = model_.units[static_cast<std::size_t>(unit_of(param))].params;
  return static_cast<std::size_t>(std::ranges::find(params, param) - params.begin());
}

void UnitUses::count_gradient(int param) {
  if (model_.params[static_cast<std::size_t>(param)].numel() == 0) return;  // expected of no backward
  Use& use = of(unit_of(param));
  const std::size_t position = position_in_unit(param);
  if (use.seen[position]) return;
  use.seen[position] = true;
  ++use.arrived;
}

void UnitUses::expect_gradient(int param, bool expected) {
  const auto index = static_cast<std::size_t>(param);
  // What has no elements may be the part of a parameter that other ranks use: no gradient comes here.
  if (!model_.params[index].trainable || model_.params[index].numel() == 0 || expected_[index] == expected) return;
  expected_[index] = expected;
  of(unit_of(param)).trainable += expected ? 1 : -1;
}

bool UnitUses::gradients_complete(int unit) const {
  const Use& use = of(unit);
  return use.arrived == use.trainable;
}

}  // namespace zeroth
