// The arithmetic of HostTable, on tensors in host memory.
#include "bindings.h"

#include <zeroth/base/error.h>
#include <zeroth/compute/device_rows.h>
#include <zeroth/device/thread_pool.h>
#include <zeroth/offload/host_rows.h>

#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace zeroth::python {
namespace {

/// Values of a dense tensor on the CPU, of this type and, if not -1, so many. Throws kUsage, naming `what`.
template <class T>
T* values_of(const at::Tensor& tensor, std::int64_t size, const char* what) {
  constexpr at::ScalarType kType = c10::CppTypeToScalarType<T>::value;
  const bool good = tensor.device().is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == kType &&
                    (size < 0 || tensor.numel() == size);
  ZR_CHECK(good, ErrorCode::kUsage, "a tensor of a host table does not fit",
           {.where = "host_table",
            .which = what,
            .expected = "dense, on the CPU, " + std::string(c10::toString(kType)) +
                        (size < 0 ? "" : ", " + std::to_string(size) + " values"),
            .got = tensor.toString() + ", " + std::to_string(tensor.numel()) + " values"});
  return tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr<T>();
}

std::span<const std::int64_t> indices_of(const at::Tensor& indices) {
  return {values_of<std::int64_t>(indices, -1, "indices"), static_cast<std::size_t>(indices.numel())};
}

/// Rows of float32 in a tensor [rows, dim] of the caller's, and threads. One thread at a time.
class HostRows {
 public:
  HostRows(at::Tensor table, int threads)
      : table_(std::move(table)), values_(values_of<float>(table_, -1, "table")), pool_(threads) {
    ZR_CHECK(table_.dim() == 2 && table_.numel() > 0, ErrorCode::kUsage, "a host table is no matrix with rows",
             {.where = "host_table"});
    shape_ = {.rows = table_.size(0), .dim = table_.size(1)};
  }

  void gather(const at::Tensor& indices, const at::Tensor& out) {
    const std::span<const std::int64_t> rows = indices_of(indices);
    require_rows(rows, shape_.rows);
    float* const to = values_of<float>(out, indices.numel() * shape_.dim, "out");
    const py::gil_scoped_release nogil;
    gather_rows(values_, shape_, rows, to, pool_);
  }

  void require(const at::Tensor& indices) const { require_rows(indices_of(indices), shape_.rows); }

  /// `indices` and `out` are tensors of a CUDA device, the thread's.
  void gather_on_device(const at::Tensor& indices, const at::Tensor& out, std::uintptr_t stream) {
    const bool good = indices.is_cuda() && out.is_cuda() && indices.is_contiguous() && out.is_contiguous() &&
                      indices.scalar_type() == at::kLong && out.scalar_type() == at::kFloat &&
                      out.numel() == indices.numel() * shape_.dim;
    ZR_CHECK(good, ErrorCode::kUsage, "tensors of a host table do not fit",
             {.where = "host_table",
              .expected = "dense, on a CUDA device: Long indices, Float rows",
              .got = indices.toString() + ", " + out.toString()});
    gather_rows_on_device({.table = values_,
                           .rows = shape_.rows,
                           .dim = shape_.dim,
                           .indices = static_cast<const std::int64_t*>(indices.const_data_ptr()),
                           .out = static_cast<float*>(out.mutable_data_ptr()),
                           .n = indices.numel()},
                          reinterpret_cast<void*>(stream));
  }

  void gather_in_8_bits(const at::Tensor& indices, std::int64_t block, const at::Tensor& values,
                        const at::Tensor& scales) {
    const std::span<const std::int64_t> rows = indices_of(indices);
    require_rows(rows, shape_.rows);
    auto* const to = values_of<std::int8_t>(values, indices.numel() * shape_.dim, "values");
    auto* const scale = values_of<float>(scales, indices.numel() * blocks_of_row(shape_.dim, block), "scales");
    const py::gil_scoped_release nogil;
    gather_rows_in_8_bits(values_, shape_, rows, block, to, scale, pool_);
  }

  std::pair<at::Tensor, at::Tensor> sum(const at::Tensor& indices, const at::Tensor& grads, float factor) {
    const TouchedRows touched = touched_by(indices, grads, factor);
    const auto count = static_cast<std::int64_t>(touched.rows.size());
    std::pair<at::Tensor, at::Tensor> result{at::empty({count}, at::kLong), at::empty({count, shape_.dim}, at::kFloat)};
    if (count == 0) return result;
    std::ranges::copy(touched.rows, result.first.mutable_data_ptr<std::int64_t>());
    std::ranges::copy(touched.sums, result.second.mutable_data_ptr<float>());
    return result;
  }

  std::size_t update(const std::string& rule, const at::Tensor& indices, const at::Tensor& grads, float factor,
                     const RowHyper& hyper, const at::Tensor& first, const at::Tensor& second) {
    const std::int64_t all = shape_.rows * shape_.dim;
    const bool adam = rule == "adam";
    float* const one = values_of<float>(first, adam ? all : rule == "sgd" ? 0 : shape_.rows, "first state");
    float* const two = values_of<float>(second, adam ? all : 0, "second state");
    const TouchedRows touched = touched_by(indices, grads, factor);
    const py::gil_scoped_release nogil;
    if (rule == "sgd") update_rows_sgd(values_, shape_, touched, hyper, pool_);
    if (rule == "rowwise_adagrad") update_rows_adagrad(values_, one, shape_, touched, hyper, pool_);
    if (adam) update_rows_adam(values_, one, two, shape_, touched, hyper, pool_);
    return touched.rows.size();
  }

 private:
  TouchedRows touched_by(const at::Tensor& indices, const at::Tensor& grads, float factor) {
    const std::span<const std::int64_t> rows = indices_of(indices);
    require_rows(rows, shape_.rows);
    const float* const from = values_of<float>(grads, indices.numel() * shape_.dim, "grads");
    const py::gil_scoped_release nogil;
    return sum_touched_rows(rows, from, shape_.dim, factor, pool_);
  }

  at::Tensor table_;
  float* values_;
  RowShape shape_{};
  ThreadPool pool_;
};

}  // namespace

void bind_host_table(py::module_& module) {
  py::class_<HostRows>(module, "HostRows")
      .def(py::init<at::Tensor, int>(), py::arg("table"), py::arg("threads"))
      .def("gather", &HostRows::gather, py::arg("indices"), py::arg("out"))
      .def("require", &HostRows::require, py::arg("indices"))
      .def("gather_on_device", &HostRows::gather_on_device, py::arg("indices"), py::arg("out"), py::arg("stream"))
      .def("gather_in_8_bits", &HostRows::gather_in_8_bits, py::arg("indices"), py::arg("block"), py::arg("values"),
           py::arg("scales"))
      .def("sum", &HostRows::sum, py::arg("indices"), py::arg("grads"), py::arg("factor"))
      .def(
          "update",
          [](HostRows& self, const std::string& rule, const at::Tensor& indices, const at::Tensor& grads, float factor,
             float lr, std::pair<float, float> betas, float eps, std::int64_t step, const at::Tensor& first,
             const at::Tensor& second) {
            const RowHyper hyper{.lr = lr, .beta1 = betas.first, .beta2 = betas.second, .eps = eps, .step = step};
            return self.update(rule, indices, grads, factor, hyper, first, second);
          },
          py::arg("rule"), py::arg("indices"), py::arg("grads"), py::arg("factor"), py::kw_only(), py::arg("lr"),
          py::arg("betas"), py::arg("eps"), py::arg("step"), py::arg("first"), py::arg("second"));
}

}  // namespace zeroth::python
