#include "bindings.h"
#include "rank_group.h"

#include <zeroth/base/error.h>
#include <zeroth/libtorch/experts.h>
#include <zeroth/libtorch/router.h>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::python {
namespace {

template <class Value, std::size_t size>
Value value_named(const std::pair<const char*, Value> (&values)[size], const std::string& name, const char* which) {
  std::string known;
  for (const auto& [one, value] : values) {
    if (name == one) return value;
    known += (known.empty() ? "" : ", ") + std::string(one);
  }
  throw Error(ErrorCode::kUsage, "there is no such way",
              {.where = "libtorch.experts", .which = which, .expected = known, .got = "\"" + name + "\""});
}

py::tuple route(const at::Tensor& logits, std::int64_t choices, const std::string& score, bool renormalize,
                double scale, const std::optional<at::Tensor>& bias, std::int64_t groups, std::int64_t groups_kept) {
  using libtorch::RouterScore;
  const std::pair<const char*, RouterScore> scores[] = {{"softmax", RouterScore::kSoftmax},
                                                        {"sigmoid", RouterScore::kSigmoid}};
  const libtorch::RouterOptions options{.choices = choices,
                                        .score = value_named(scores, score, "score"),
                                        .renormalize = renormalize,
                                        .scale = scale,
                                        .bias = bias.value_or(at::Tensor()),
                                        .groups = groups,
                                        .groups_kept = groups_kept};
  libtorch::Routing routing;
  {
    const py::gil_scoped_release no_gil;
    routing = libtorch::route(logits, options);
  }
  return py::make_tuple(routing.experts, routing.weights, routing.scores);
}

at::Tensor keep_within(const at::Tensor& experts, const at::Tensor& weights, std::int64_t num_experts,
                       std::int64_t capacity, const std::string& by, std::uint64_t seed) {
  using libtorch::KeepBy;
  const std::pair<const char*, KeepBy> ways[] = {
      {"position", KeepBy::kPosition}, {"weight", KeepBy::kWeight}, {"draw", KeepBy::kDraw}};
  const KeepBy way = value_named(ways, by, "by");
  const py::gil_scoped_release no_gil;
  return libtorch::keep_within(experts, weights, num_experts, capacity, way, seed);
}

void bind_load(py::module_& module) {
  using libtorch::ExpertLoad;
  py::class_<ExpertLoad>(module, "ExpertLoad")
      .def(py::init<std::int64_t>(), py::arg("num_experts"))
      .def("begin_step", &ExpertLoad::begin_step)
      .def(
          "add",
          [](ExpertLoad& self, const at::Tensor& experts, const py::iterable& objects) {
            std::vector<libtorch::RankGroup> groups;
            for (const py::handle& object : objects) groups.push_back(rank_group_of(object));
            const py::gil_scoped_release no_gil;
            self.add(experts, groups);
          },
          py::arg("experts"), py::arg("groups"))
      .def("balance_loss", &ExpertLoad::balance_loss, py::arg("scores"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("chosen", &ExpertLoad::chosen)
      .def_property_readonly("tokens", &ExpertLoad::tokens);
}

}  // namespace

void bind_experts(py::module_& module) {
  using libtorch::TokenExchange;
  py::class_<TokenExchange>(module, "TokenExchange")
      .def(py::init([](const at::Tensor& experts, std::int64_t num_experts, const py::object& object) {
             std::optional<libtorch::RankGroup> group;
             if (!object.is_none()) group.emplace(rank_group_of(object));
             const py::gil_scoped_release no_gil;
             return TokenExchange(experts, num_experts, std::move(group));
           }),
           py::arg("experts"), py::arg("num_experts"), py::arg("group") = py::none())
      .def("send", &TokenExchange::send, py::arg("x"), py::call_guard<py::gil_scoped_release>())
      .def("bring", &TokenExchange::bring, py::arg("y"), py::arg("weights"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("rows", &TokenExchange::rows)
      .def_property_readonly("expert_of_row", &TokenExchange::expert_of_row)
      .def_property_readonly("chosen", &TokenExchange::chosen);
  bind_load(module);
  module.def("route", &route, py::arg("logits"), py::arg("choices"), py::kw_only(), py::arg("score") = "softmax",
             py::arg("renormalize") = true, py::arg("scale") = 1.0, py::arg("bias") = py::none(), py::arg("groups") = 1,
             py::arg("groups_kept") = 1);
  module.def("expert_capacity", &libtorch::expert_capacity, py::arg("tokens"), py::arg("num_experts"),
             py::arg("choices"), py::arg("factor"), py::arg("least"));
  module.def("keep_within", &keep_within, py::arg("experts"), py::arg("weights"), py::arg("num_experts"),
             py::arg("capacity"), py::arg("by") = "position", py::arg("seed") = 0);
  module.def("router_z_loss", &libtorch::router_z_loss, py::arg("logits"), py::call_guard<py::gil_scoped_release>());
  using libtorch::ExpertMatrices;
  py::class_<ExpertMatrices>(module, "ExpertMatrices")
      .def(py::init([](const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
             return ExpertMatrices(weight, bias.value_or(at::Tensor()));
           }),
           py::arg("weight"), py::arg("bias"))
      .def("linear", &ExpertMatrices::linear, py::arg("x"), py::arg("expert"),
           py::call_guard<py::gil_scoped_release>());
  using libtorch::ExpertParts;
  py::class_<ExpertParts>(module, "ExpertParts")
      .def(py::init<const at::Tensor&>(), py::arg("stacked"))
      .def("part", &ExpertParts::part, py::arg("expert"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "grouped_linear",
      [](const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
         const std::vector<std::int64_t>& rows) {
        const py::gil_scoped_release no_gil;
        return libtorch::grouped_linear(x, weight, bias.value_or(at::Tensor()), rows);
      },
      py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("rows"));
}

}  // namespace zeroth::python
