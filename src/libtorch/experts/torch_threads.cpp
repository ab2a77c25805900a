#include "libtorch/experts/torch_threads.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>

namespace zeroth::libtorch {

// at::parallel_for() is a template: in a file that is built without OpenMP it is a loop on the calling thread. With
// OpenMP this library would bring a second runtime beside that of torch's wheel, with threads of its own. An iterator
// over a tensor is a function inside of torch, which splits its elements over torch's threads. So the loop is that of a
// tensor of `count` bytes, none of which is touched.
void for_parts(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= 0) return;
  if (count <= grain || at::get_num_threads() == 1 || at::in_parallel_region()) return body(0, count);
  const at::NoGradGuard no_gradient;
  const at::Tensor places = at::empty({count}, at::kByte);
  const char* const begin = static_cast<const char*>(places.data_ptr());
  at::TensorIterator::borrowing_nullary_op(places).for_each(
      [&](char** data, const std::int64_t* /*strides*/, std::int64_t n, std::int64_t /*rows: one*/) {
        const std::int64_t first = data[0] - begin;
        body(first, first + n);
      },
      grain);
}

std::int64_t grain_of_rows(std::int64_t row_bytes) {
  constexpr std::int64_t kWorthAThread = std::int64_t{64} << 10;
  return std::max<std::int64_t>(1, kWorthAThread / std::max<std::int64_t>(row_bytes, 1));
}

std::optional<DType> kernel_dtype(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Double:
      return DType::kFloat64;
    case c10::ScalarType::Float:
      return DType::kFloat32;
    case c10::ScalarType::BFloat16:
      return DType::kBFloat16;
    case c10::ScalarType::Half:
      return DType::kFloat16;
    default:
      return std::nullopt;
  }
}

c10::ScalarType weight_dtype(c10::ScalarType of_rows) {
  return of_rows == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace zeroth::libtorch
