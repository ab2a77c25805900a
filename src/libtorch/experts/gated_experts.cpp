#include "libtorch/experts/expert_call.h"
#include "libtorch/parallel/parameter_slice.h"

#include <zeroth/libtorch/experts.h>
#include <zeroth/parallel/slices.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/silu.h>
#include <c10/util/StringUtil.h>

#include <cstddef>
#include <utility>

namespace zeroth::libtorch {

GatedExpertsImpl::GatedExpertsImpl(const at::Tensor& whole_gate_up, const at::Tensor& whole_down)
    : num_experts_(whole_down.size(0)) {
  const bool fits = whole_gate_up.dim() == 3 && whole_down.dim() == 3 && whole_gate_up.size(0) == num_experts_ &&
                    whole_gate_up.size(1) == 2 * whole_down.size(2) && whole_gate_up.size(2) == whole_down.size(1);
  if (!fits)
    refuse_experts("", "gate_up, down", "these are not the matrices of one layer of experts",
                   "[E, 2 F, D] and [E, D, F]", c10::str(whole_gate_up.sizes(), " and ", whole_down.sizes()));
  gate_up = register_parameter("gate_up", whole_gate_up.detach());
  down = register_parameter("down", whole_down.detach());
}

void GatedExpertsImpl::share(const ExpertRanks& ranks) {
  const RankGroup& group = ranks.group();
  if (ranks_) refuse_experts(group.who(), "share()", "the experts are shared already", "one call", "two");
  if (num_experts_ < group.size())
    refuse_experts(group.who(), "experts", "some ranks would have no expert", c10::str(group.size(), " or more"),
                   c10::str(num_experts_));
  const std::vector<std::int64_t> sizes = slice_sizes(num_experts_, group.size());
  const auto take = [&](const char* name, at::Tensor& parameter) {
    const bool trains = parameter.requires_grad();
    parameter = part_of(parameter, 0, sizes, group).set_requires_grad(trains);
    parameters_[name] = parameter;
  };
  take("gate_up", gate_up);
  take("down", down);
  ranks_ = ranks;
}

void GatedExpertsImpl::set_options(const ExpertOptions& options) {
  if (!ranks_) refuse_experts("", "set_options()", "no ranks share the experts", "share() before", "none");
  ranks_->set_options(options);
}

at::Tensor GatedExpertsImpl::forward(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weights) const {
  const TokenExchange exchange(experts, num_experts_, ranks_);
  const std::vector<at::Tensor> gates = exchange.blocks_of_runs(gate_up);
  const std::vector<at::Tensor> downs = exchange.blocks_of_runs(down);
  return exchange.through(x, weights, [&](const at::Tensor& rows, const ExpertRun& run) {
    const auto at = static_cast<std::size_t>(&run - exchange.runs().data());
    const std::vector<at::Tensor> gate_and_up = grouped_linear(rows, gates[at], {}, run.rows).chunk(2, -1);
    const at::Tensor hidden = at::silu(gate_and_up[0]) * gate_and_up[1];
    return grouped_linear(hidden, downs[at], {}, run.rows);
  });
}

std::vector<std::pair<std::string, ParameterBox>> GatedExpertsImpl::boxes() const {
  if (!ranks_) return {};
  const RankGroup& group = ranks_->group();
  const std::vector<std::int64_t> sizes = slice_sizes(num_experts_, group.size());
  const auto box = [&](const at::Tensor& part) {
    ParameterBox own = box_of(part, 0, sizes, group, ranks_->axes().front());
    own.axes.further.assign(ranks_->axes().begin() + 1, ranks_->axes().end());
    return own;
  };
  return {{"gate_up", box(gate_up)}, {"down", box(down)}};
}

}  // namespace zeroth::libtorch
