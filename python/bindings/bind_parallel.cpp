#include "bindings.h"
#include "rank_group.h"

#include <zeroth/base/error.h>
#include <zeroth/libtorch/async_sum.h>
#include <zeroth/libtorch/collectives.h>
#include <zeroth/libtorch/loss_terms.h>
#include <zeroth/libtorch/redistribute.h>
#include <zeroth/libtorch/tensor_parallel.h>
#include <zeroth/parallel/sbp.h>
#include <zeroth/parallel/slices.h>
#include <zeroth/parallel/task_shares.h>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
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

at::Tensor gathered_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                           std::int64_t dim, const py::object& object, const SliceSizes& sizes) {
  const libtorch::RankGroup group = rank_group_of(object);
  const py::gil_scoped_release no_gil;
  return libtorch::gathered_linear(x, weight, bias.value_or(at::Tensor()), dim, group, sizes);
}

std::vector<at::Tensor> ring_shift(const std::vector<at::Tensor>& tensors, const py::object& object, int by) {
  const libtorch::RankGroup group = rank_group_of(object);
  const py::gil_scoped_release no_gil;
  return libtorch::ring_shift(tensors, group, by);
}

at::Tensor redistribute(const at::Tensor& x, const Sbp& from, const Sbp& to, const py::object& object,
                        const SliceSizes& source_sizes, const SliceSizes& to_sizes, bool gradients_alike) {
  const libtorch::RankGroup group = rank_group_of(object);
  const py::gil_scoped_release no_gil;
  return libtorch::redistribute(
      x, from, to, group,
      {.source_sizes = source_sizes,
       .to_sizes = to_sizes,
       .gradients = gradients_alike ? BroadcastGradients::kAlike : BroadcastGradients::kParts});
}

at::Tensor vocab_cross_entropy(const at::Tensor& local_logits, const at::Tensor& targets, const py::object& object,
                               std::int64_t ignore_index, const std::string& reduction, const SliceSizes& vocab_sizes) {
  using libtorch::LossReduction;
  const std::pair<const char*, LossReduction> reductions[] = {
      {"mean", LossReduction::kMean}, {"sum", LossReduction::kSum}, {"none", LossReduction::kNone}};
  const libtorch::RankGroup group = rank_group_of(object);
  for (const auto& [name, value] : reductions) {
    if (reduction != name) continue;
    const py::gil_scoped_release no_gil;
    return libtorch::vocab_cross_entropy(
        local_logits, targets, group, {.ignore_index = ignore_index, .reduction = value, .vocab_sizes = vocab_sizes});
  }
  throw Error(ErrorCode::kUsage, "there is no such reduction",
              {.where = "libtorch.vocab_cross_entropy",
               .which = "reduction",
               .expected = "mean, sum or none",
               .got = "\"" + reduction + "\""});
}

at::Tensor part_of_loss(const at::Tensor& term, const py::object& object, std::optional<std::int64_t> count) {
  const libtorch::RankGroup group = rank_group_of(object);
  const py::gil_scoped_release no_gil;
  return count ? libtorch::part_of_loss(term, *count, group) : libtorch::part_of_loss(term, group);
}

void bind_async_sum(py::module_& module) {
  using libtorch::PendingSum;
  py::class_<PendingSum>(module, "PendingSum").def("wait", &PendingSum::wait, py::call_guard<py::gil_scoped_release>());
  module.def(
      "reduce_from_group_async",
      [](const at::Tensor& x, const py::object& object) {
        const libtorch::RankGroup group = rank_group_of(object);
        const py::gil_scoped_release no_gil;
        return libtorch::reduce_from_group_async(x, group);
      },
      py::arg("x"), py::arg("group"));
  module.def(
      "chunked_linear_reduce",
      [](const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, int chunks,
         const py::object& object) {
        const libtorch::RankGroup group = rank_group_of(object);
        const py::gil_scoped_release no_gil;
        return libtorch::chunked_linear_reduce(x, weight, bias.value_or(at::Tensor()), chunks, group);
      },
      py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("chunks"), py::arg("group"));
}

void bind_sbp(py::module_& module) {
  py::class_<Sbp>(module, "Sbp")
      .def_static("split", &Sbp::split, py::arg("dim"))
      .def_static("broadcast", &Sbp::broadcast)
      .def_static("partial", &Sbp::partial)
      .def(
          "gradient",
          [](const Sbp& self, bool alike) {
            return gradient_of(self, alike ? BroadcastGradients::kAlike : BroadcastGradients::kParts);
          },
          py::arg("gradients_alike") = false)
      .def(
          "__eq__", [](const Sbp& self, const Sbp& other) { return self == other; }, py::is_operator())
      .def("__hash__", [](const Sbp& self) { return py::hash(py::str(describe(self))); })
      .def("__repr__", [](const Sbp& self) { return describe(self); });
  module.def("redistribute", &redistribute, py::arg("x"), py::arg("source"), py::arg("to"), py::arg("group"),
             py::kw_only(), py::arg("source_sizes") = py::none(), py::arg("to_sizes") = py::none(),
             py::arg("gradients_alike") = false);
  module.def(
      "conversion_bytes",
      [](const Sbp& from, const Sbp& to, const std::vector<std::int64_t>& shape, std::int64_t element_bytes,
         int ranks) { return conversion_bytes(from, to, shape, element_bytes, ranks); },
      py::arg("source"), py::arg("to"), py::arg("shape"), py::arg("element_bytes"), py::arg("ranks"));
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
  module.def("gathered_linear", &gathered_linear, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("dim"),
             py::arg("group"), py::arg("sizes") = py::none());
  module.def("ring_shift", &ring_shift, py::arg("tensors"), py::arg("group"), py::arg("by") = 1);
  module.def("part_of_loss", &part_of_loss, py::arg("term"), py::arg("group"), py::arg("count") = py::none());
  module.def("slice_sizes", &zeroth::slice_sizes, py::arg("elements"), py::arg("ranks"));
  module.def(
      "share_tasks",
      [](const std::vector<double>& loads, int ranks) {
        py::list plan;
        for (const auto& of_rank : share_tasks(loads, ranks)) {
          py::list parts;
          for (const TaskPart& part : of_rank) parts.append(py::make_tuple(part.task, part.part, part.parts));
          plan.append(parts);
        }
        return plan;
      },
      py::arg("loads"), py::arg("ranks"));
  module.def("vocab_cross_entropy", &vocab_cross_entropy, py::arg("local_logits"), py::arg("targets"), py::arg("group"),
             py::kw_only(), py::arg("ignore_index") = -100, py::arg("reduction") = "mean",
             py::arg("vocab_sizes") = py::none());
  bind_sbp(module);
  bind_async_sum(module);
}

}  // namespace zeroth::python
