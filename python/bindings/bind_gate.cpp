#include "bindings.h"
#include "rank_group.h"

#include <zeroth/base/error.h>
#include <zeroth/libtorch/balance.h>
#include <zeroth/libtorch/moe.h>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zeroth::python {
namespace {

/// The number of a name in an enumeration's order.
template <class Enum, std::size_t size>
Enum gate_way(const std::array<std::string_view, size>& names, const std::string& name, const char* which) {
  std::string known;
  for (std::size_t at = 0; at < size; ++at) {
    if (names[at] == name) return static_cast<Enum>(at);
    known += (at == 0 ? "" : ", ") + std::string(names[at]);
  }
  throw Error(ErrorCode::kUsage, "there is no such way",
              {.where = "libtorch.experts", .which = which, .expected = known, .got = "\"" + name + "\""});
}

/// A rule of Python: function(logits, choices) -> (experts, weights, scores).
libtorch::RouterRule rule_of(const py::object& function) {
  if (function.is_none()) return {};
  return [function](const at::Tensor& logits, const libtorch::RouterOptions& options) {
    const py::gil_scoped_acquire gil;
    const auto result = function(logits, options.choices).cast<std::array<at::Tensor, 3>>();
    return libtorch::Routing{.experts = result[0], .weights = result[1], .scores = result[2]};
  };
}

libtorch::GateOptions gate_options(const py::kwargs& given) {
  using namespace libtorch;  // NOLINT(google-build-using-namespace): names of the options
  GateOptions options;
  options.router.choices = 1;
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    if (name == "k") {
      options.router.choices = value.cast<std::int64_t>();
    } else if (name == "score") {
      constexpr std::array<std::string_view, 2> kScores{"softmax", "sigmoid"};
      options.router.score = gate_way<RouterScore>(kScores, value.cast<std::string>(), "score");
    } else if (name == "renormalize") {
      options.router.renormalize = value.cast<bool>();
    } else if (name == "scale") {
      options.router.scale = value.cast<double>();
    } else if (name == "groups") {
      options.router.groups = value.cast<std::int64_t>();
    } else if (name == "groups_kept") {
      options.router.groups_kept = value.cast<std::int64_t>();
    } else if (name == "rule") {
      options.rule = rule_of(py::reinterpret_borrow<py::object>(value));
    } else if (name == "schedule") {
      if (value.is_none()) continue;
      const auto [first, last, steps] = value.cast<std::array<std::int64_t, 3>>();
      options.schedule = ChoiceSchedule{.first = first, .last = last, .steps = steps};
    } else if (name == "capacity_factor") {
      options.capacity_factor = value.cast<double>();
    } else if (name == "eval_capacity_factor") {
      options.eval_capacity_factor = value.cast<double>();
    } else if (name == "min_capacity") {
      options.min_capacity = value.cast<std::int64_t>();
    } else if (name == "drop_tokens") {
      options.drop_tokens = value.cast<bool>();
    } else if (name == "use_rts") {
      options.use_rts = value.cast<bool>();
    } else if (name == "noise") {
      constexpr std::array<std::string_view, 3> kNoises{"none", "jitter", "gumbel"};
      options.noise = gate_way<GateNoise>(kNoises, value.cast<std::string>(), "noise");
    } else if (name == "top2_2nd_expert_sampling") {
      options.top2_2nd_expert_sampling = value.cast<bool>();
    } else if (name == "balance") {
      constexpr std::array<std::string_view, 3> kBalances{"loss", "bias", "both"};
      options.balance = gate_way<BalanceBy>(kBalances, value.cast<std::string>(), "balance");
    } else if (name == "bias_rate") {
      options.bias_rate = value.cast<double>();
    } else if (name == "seed") {
      options.seed = value.cast<std::uint64_t>();
    } else {
      throw py::type_error("Gate has no option " + name);
    }
  }
  return options;
}

}  // namespace

void bind_gate(py::module_& module) {
  using libtorch::Gate;
  using libtorch::Gated;
  py::class_<Gated>(module, "Gated")
      .def_readonly("experts", &Gated::experts)
      .def_readonly("kept", &Gated::kept)
      .def_readonly("weights", &Gated::weights)
      .def_readonly("scores", &Gated::scores)
      .def_readonly("logits", &Gated::logits)
      .def_readonly("balance", &Gated::balance)
      .def_readonly("counts", &Gated::counts)
      .def_readonly("dropped", &Gated::dropped);
  py::class_<Gate>(module, "Gate")
      .def(py::init([](std::int64_t num_experts, const py::kwargs& options) {
             return Gate(num_experts, gate_options(options));
           }),
           py::arg("num_experts"))
      .def(
          "balance_over",
          [](Gate& self, const py::iterable& objects) {
            std::vector<libtorch::RankGroup> groups;
            for (const py::handle& object : objects) groups.push_back(rank_group_of(object));
            self.balance_over(std::move(groups));
          },
          py::arg("groups"))
      .def_property("place", &Gate::place, &Gate::set_place)
      .def("set_choices", &Gate::set_choices, py::arg("choices"))
      .def("set_capacity", &Gate::set_capacity, py::arg("factor"), py::arg("eval_factor"), py::arg("least"))
      .def("choices", &Gate::choices, py::arg("step") = 0)
      .def(
          "forward",
          [](Gate& self, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
             const std::optional<at::Tensor>& used, bool training, std::int64_t number, std::int64_t step) {
            const libtorch::GateInput input{.x = x,
                                            .weight = weight,
                                            .bias = bias.value_or(at::Tensor()),
                                            .used = used.value_or(at::Tensor()),
                                            .training = training,
                                            .number = number,
                                            .step = step};
            const py::gil_scoped_release no_gil;
            return self.forward(input);
          },
          py::arg("x"), py::arg("weight"), py::kw_only(), py::arg("bias") = py::none(), py::arg("used") = py::none(),
          py::arg("training") = true, py::arg("number") = 0, py::arg("step") = 0)
      .def(
          "begin_step",
          [](Gate& self, const std::optional<at::Tensor>& bias) { self.begin_step(bias.value_or(at::Tensor())); },
          py::arg("bias") = py::none())
      .def_static("is_repeated", &Gate::is_repeated)
      .def_property_readonly("load", &Gate::load, py::return_value_policy::reference_internal);
  module.def("choices_at", &libtorch::choices_at, py::arg("step"), py::arg("steps"), py::arg("first"), py::arg("last"));
  module.def("fixed_router_weight", &libtorch::fixed_router_weight, py::arg("num_experts"), py::arg("width"),
             py::arg("seed"));
  module.def("sequence_balance_loss", &libtorch::sequence_balance_loss, py::arg("scores"), py::arg("experts"),
             py::arg("sequences"), py::call_guard<py::gil_scoped_release>());
  module.def("update_balance_bias", &libtorch::update_balance_bias, py::arg("bias"), py::arg("load"), py::arg("rate"));
}

}  // namespace zeroth::python
