// Random models for the property tests: units of odd sizes, mixed dtypes, frozen parts, a repeated class.
#pragma once

#include <zeroth/zero/model_layout.h>

#include <rapidcheck.h>

#include <string>
#include <vector>

namespace zeroth::test {

struct RandomModel {
  std::vector<ParamSpec> params;
  std::vector<UnitSpec> units;
};

[[nodiscard]] inline RandomModel any_model() {
  RandomModel model;
  const auto units = *rc::gen::inRange(0, 8);
  for (int unit = 0; unit < units; ++unit) {
    UnitSpec spec{.name = "u" + std::to_string(unit), .repeated = *rc::gen::inRange(0, 3) != 0};
    const auto count = *rc::gen::inRange(0, 5);
    for (int index = 0; index < count; ++index) {
      ParamSpec param{.name = spec.name + ".p" + std::to_string(index)};
      param.shape = *rc::gen::container<std::vector<std::int64_t>>(
          *rc::gen::inRange<std::size_t>(0, 4), rc::gen::element<std::int64_t>(0, 1, 2, 7, 16, 31, 33));
      param.dtype = *rc::gen::element(DType::kFloat32, DType::kBFloat16, DType::kFloat64);
      param.trainable = *rc::gen::inRange(0, 4) != 0;
      param.grad_factor = *rc::gen::element(1.0, 0.5);
      if (*rc::gen::inRange(0, 6) == 0) param.aliases = {param.name + ".tied"};
      spec.params.push_back(static_cast<int>(model.params.size()));
      model.params.push_back(std::move(param));
    }
    model.units.push_back(std::move(spec));
  }
  return model;
}

[[nodiscard]] inline ShardingPlan any_plan() {
  ShardingPlan plan = zero_plan(*rc::gen::inRange(0, 4), {"dp"});
  plan.policy = *rc::gen::element(ReductionPolicy::kPerMicroStep, ReductionPolicy::kPerStep);
  plan.reshard = *rc::gen::element(Reshard::kDefault, Reshard::kAll, Reshard::kNone);
  plan.ring_slots = *rc::gen::inRange(1, 5);
  plan.prefetch_units = *rc::gen::inRange(0, 4);
  return plan;
}

}  // namespace zeroth::test
