// Non-owning views of dense tensors: {data, shape, dtype}; passed by value, never allocate.
#pragma once

#include <zeroth/base/dtype.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>

namespace zeroth {

struct ConstTensorView {
  const std::byte* data = nullptr;
  std::span<const std::int64_t> shape{};  ///< owned by the caller, who keeps it alive
  DType dtype = DType::kFloat32;

  [[nodiscard]] std::int64_t numel() const {
    return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>{});
  }
  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(numel()) * size_of(dtype); }
};

struct TensorView {
  std::byte* data = nullptr;
  std::span<const std::int64_t> shape{};
  DType dtype = DType::kFloat32;

  [[nodiscard]] std::int64_t numel() const { return ConstTensorView(*this).numel(); }
  [[nodiscard]] std::size_t bytes() const { return ConstTensorView(*this).bytes(); }
  // NOLINTNEXTLINE(google-explicit-constructor): a mutable view is a view
  operator ConstTensorView() const { return {data, shape, dtype}; }
};

}  // namespace zeroth
