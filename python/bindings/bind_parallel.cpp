#include "bindings.h"
#include "rank_group.h"

#include <zeroth/libtorch/collectives.h>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <vector>

namespace zeroth::python {
namespace {

using libtorch::SliceSizes;

/// Binds call(x, group).
template <auto call>
void bind_sum(py::module_& module, const char* name) {
  module.def(
      name,
      [](const at::Tensor& x, const py::object& object) {
        const libtorch::RankGroup group = rank_group_of(object);
        const py::gil_scoped_release no_gil;
        return call(x, group);
      },
      py::arg("x"), py::arg("group"));
}

/// Binds call(x, dim, group, sizes).
template <auto call>
void bind_slices(py::module_& module, const char* name) {
  module.def(
      name,
      [](const at::Tensor& x, std::int64_t dim, const py::object& object, const SliceSizes& sizes) {
        const libtorch::RankGroup group = rank_group_of(object);
        const py::gil_scoped_release no_gil;
        return call(x, dim, group, sizes);
      },
      py::arg("x"), py::arg("dim"), py::arg("group"), py::arg("sizes") = py::none());
}

at::Tensor all_to_all(const at::Tensor& x, std::int64_t split_dim, std::int64_t concat_dim, const py::object& object,
                      const SliceSizes& split_sizes, const SliceSizes& concat_sizes) {
  const libtorch::RankGroup group = rank_group_of(object);
  const py::gil_scoped_release no_gil;
  return libtorch::all_to_all(x, split_dim, concat_dim, group, split_sizes, concat_sizes);
}

std::vector<at::Tensor> ring_shift(const std::vector<at::Tensor>& tensors, const py::object& object, int by) {
  const libtorch::RankGroup group = rank_group_of(object);
  const py::gil_scoped_release no_gil;
  return libtorch::ring_shift(tensors, group, by);
}

std::vector<std::int64_t> slice_sizes(std::int64_t elements, int ranks) {
  if (elements < 0 || ranks < 1) throw py::value_error("slice_sizes: expected elements from 0 and ranks from 1");
  return libtorch::slice_sizes(elements, ranks);
}

}  // namespace

void bind_parallel(py::module_& module) {
  bind_sum<&libtorch::copy_to_group>(module, "copy_to_group");
  bind_sum<&libtorch::reduce_from_group>(module, "reduce_from_group");
  bind_sum<&libtorch::all_reduce>(module, "all_reduce");
  bind_slices<&libtorch::split_to_group>(module, "split_to_group");
  bind_slices<&libtorch::gather_from_group>(module, "gather_from_group");
  bind_slices<&libtorch::all_gather>(module, "all_gather");
  bind_slices<&libtorch::reduce_scatter>(module, "reduce_scatter");
  module.def("all_to_all", &all_to_all, py::arg("x"), py::arg("split_dim"), py::arg("concat_dim"), py::arg("group"),
             py::arg("split_sizes") = py::none(), py::arg("concat_sizes") = py::none());
  module.def("ring_shift", &ring_shift, py::arg("tensors"), py::arg("group"), py::arg("by") = 1);
  module.def("slice_sizes", &slice_sizes, py::arg("elements"), py::arg("ranks"));
}

}  // namespace zeroth::python
