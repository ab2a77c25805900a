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
namespace {

/// Of the experts here, for each run of an exchange.
std::vector<at::Tensor> in_runs(const at::Tensor& parameter, const TokenExchange& exchange) {
  if (exchange.runs().size() == 1) return {parameter};
  return parameter.split_with_sizes(exchange.sizes_of_runs());
}

}  // namespace

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

void GatedExpertsImpl::share(const ExpertRanks& ranks, std::string axis) {
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
  axis_ = std::move(axis);
}

void GatedExpertsImpl::set_options(const ExpertOptions& options) {
  if (!ranks_) refuse_experts("", "set_options()", "no ranks share the experts", "share() before", "none");
  ranks_->set_options(options);
}

at::Tensor GatedExpertsImpl::forward(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weights) const {
  const TokenExchange exchange(experts, num_experts_, ranks_);
  const std::vector<at::Tensor> gates = in_runs(exchange.with_copies(gate_up), exchange);
  const std::vector<at::Tensor> downs = in_runs(exchange.with_copies(down), exchange);
  std::size_t at = 0;
  return exchange.through(x, weights, [&](const at::Tensor& rows, const ExpertRun& run) {
    const std::vector<at::Tensor> gate_and_up = grouped_linear(rows, gates[at], {}, run.rows).chunk(2, -1);
    const at::Tensor hidden = at::silu(gate_and_up[0]) * gate_and_up[1];
    return grouped_linear(hidden, downs[at++], {}, run.rows);
  });
}

std::vector<std::pair<std::string, ParameterBox>> GatedExpertsImpl::boxes() const {
  if (!ranks_) return {};
  const RankGroup& group = ranks_->group();
  const std::vector<std::int64_t> sizes = slice_sizes(num_experts_, group.size());
  return {{"gate_up", box_of(gate_up, 0, sizes, group, axis_)}, {"down", box_of(down, 0, sizes, group, axis_)}};
}

}  // namespace zeroth::libtorch
