#include "bindings.h"
#include "rank_group.h"

#include <zeroth/libtorch/experts.h>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace zeroth::python {

void bind_experts(py::module_& module) {
  using libtorch::TokenExchange;
  py::class_<TokenExchange>(module, "TokenExchange")
      .def(py::init([](const at::Tensor& experts, std::int64_t num_experts, const py::object& object) {
             const libtorch::RankGroup group = rank_group_of(object);
             const py::gil_scoped_release no_gil;
             return TokenExchange(experts, num_experts, group);
           }),
           py::arg("experts"), py::arg("num_experts"), py::arg("group"))
      .def("send", &TokenExchange::send, py::arg("x"), py::call_guard<py::gil_scoped_release>())
      .def("bring", &TokenExchange::bring, py::arg("y"), py::arg("weights"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("rows", &TokenExchange::rows)
      .def_property_readonly("expert_of_row", &TokenExchange::expert_of_row)
      .def_property_readonly("chosen", &TokenExchange::chosen);
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
