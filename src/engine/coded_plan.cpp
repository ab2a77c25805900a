#include "engine/coded_plan.h"

#include "optim/further_state.h"
#include "zero/coded_calls.h"

#include <zeroth/base/error.h>

#include <string>
#include <utility>

namespace zeroth {

std::vector<ParamSpec> with_separate_vectors(std::vector<ParamSpec> params, const EngineSettings& settings) {
  if (!settings.plan.codes.any()) return params;
  for (ParamSpec& param : params) param.separate = true;
  return params;
}

std::unique_ptr<Optimizer> optimizer_of(const EngineSettings& settings) {
  std::unique_ptr<Optimizer> optimizer =
      settings.own_optimizer ? settings.own_optimizer() : make_optimizer(settings.optimizer);
  if (!settings.plan.codes.keeps_errors()) return optimizer;
  return with_further_state(std::move(optimizer), {.name = std::string(kReductionError), .shape = StateShape::kRank});
}

std::string lossy_part(const WireCodes& codes) {
  std::string text;
  if (codes.gradient_bits > 0) {
    text = "gradients of matrices are summed from codes of " + std::to_string(codes.gradient_bits) + " bits" +
           (codes.feedback ? ", and errors are fed back" : ", and errors are lost");
  }
  if (codes.parameter_bits > 0)
    text += (text.empty() ? "" : "; ") + std::string("matrices are gathered as codes of 8 bits");
  return text;
}

void require_codes_fit(const EngineSettings& settings, const Optimizer& optimizer, bool beside_device) {
  const ShardingPlan& plan = settings.plan;
  if (plan.codes.gradient_bits == 0) return;
  ZR_CHECK(!optimizer.has_messages(), ErrorCode::kConfig,
           "gradients travel in codes, and the optimizer exchanges messages in the place of gradients",
           {.where = "engine",
            .which = "/zero_optimization/zero_quantized_gradients with optimizer " + std::string(optimizer.name()),
            .expected = "one of the two"});
  const bool leaves = plan.residency.optimizer != Residency::kDevice || plan.residency.gradient != Residency::kDevice;
  ZR_CHECK(!beside_device || !leaves, ErrorCode::kConfig,
           "sums of gradients in codes, or the errors of these, would rest beside the device",
           {.where = "engine",
            .which = "/zero_optimization/zero_quantized_gradients with offload_optimizer",
            .expected = "states on the device, or ranks of a CPU"});
}

}  // namespace zeroth
