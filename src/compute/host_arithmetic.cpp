#include "compute/host_arithmetic.h"

#include <algorithm>
#include <vector>

namespace zeroth::detail {
namespace {

template <class T>
void add_scaled(kernels::NormAccumulator& norm, const void* data, std::int64_t n, double factor, kernels::Isa isa) {
  const auto scale = static_cast<T>(factor);
  const T* from = static_cast<const T*>(data);
  std::vector<T> scaled(from, from + n);
  for (T& value : scaled) value *= scale;
  norm.add(scaled.data(), DTypeOf<T>::value, n, isa);
}

}  // namespace

void fill_entries(void* data, std::int64_t n, DType dtype, double value) {
  const auto as = [&]<class T>(T typed) { std::fill_n(static_cast<T*>(data), n, typed); };
  switch (dtype) {
    case DType::kFloat64:
      return as(value);
    case DType::kFloat32:
      return as(static_cast<float>(value));
    case DType::kBFloat16:
      return as(BFloat16(static_cast<float>(value)));
    case DType::kFloat16:
      return as(Float16(static_cast<float>(value)));
    case DType::kInt64:
      return as(static_cast<std::int64_t>(value));
    case DType::kInt32:
      return as(static_cast<std::int32_t>(value));
    case DType::kUInt8:
      return as(static_cast<std::uint8_t>(value));
  }
}

void add_to_norm(kernels::NormAccumulator& norm, const void* data, DType dtype, std::int64_t n, double factor,
                 kernels::Isa isa) {
  if (factor == 1.0) {
    norm.add(data, dtype, n, isa);
  } else if (dtype == DType::kFloat64) {
    add_scaled<double>(norm, data, n, factor, isa);
  } else {
    add_scaled<float>(norm, data, n, factor, isa);
  }
}

}  // namespace zeroth::detail
