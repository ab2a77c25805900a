// The arithmetic of sums over sources for one vector (or lane) of elements, and their types.
#pragma once

#include <kernels/common/lane.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

constexpr bool is_summable(DType src, DType dst) {
  switch (src) {
    case DType::kFloat32:
      return dst == DType::kFloat32 || dst == DType::kBFloat16 || dst == DType::kFloat16;
    case DType::kBFloat16:
    case DType::kFloat16:
      return dst == DType::kFloat32 || dst == src;
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kInt32:
      return dst == src;
    case DType::kUInt8:
      break;
  }
  return false;
}

/// SumType: the type of the lanes, which load In and store Out.
template <class SumType, class OutType, class InType>
struct SumTypes {
  using Sum = SumType;
  using Out = OutType;
  using In = InType;
};

/// Calls body(SumTypes<...>{}) for a pair of types that is_summable.
template <class Body>
ZR_INLINE void with_sum_types(DType src, DType dst, const Body& body) {
  switch (src) {
    case DType::kFloat64:
      return body(SumTypes<double, double, double>{});
    case DType::kInt64:
      return body(SumTypes<std::uint64_t, std::uint64_t, std::uint64_t>{});
    case DType::kInt32:
      return body(SumTypes<std::uint32_t, std::uint32_t, std::uint32_t>{});
    case DType::kBFloat16:
      return dst == DType::kBFloat16 ? body(SumTypes<float, BFloat16, BFloat16>{})
                                     : body(SumTypes<float, float, BFloat16>{});
    case DType::kFloat16:
      return dst == DType::kFloat16 ? body(SumTypes<float, Float16, Float16>{})
                                    : body(SumTypes<float, float, Float16>{});
    default:
      if (dst == DType::kFloat16) return body(SumTypes<float, Float16, float>{});
      return dst == DType::kBFloat16 ? body(SumTypes<float, BFloat16, float>{}) : body(SumTypes<float, float, float>{});
  }
}

/// (sum + source(kFirst)) + source(kFirst + 1) ... to source(kEnd - 1).
template <int kFirst, int kEnd, class W, class Source>
ZR_HOST_DEVICE ZR_INLINE W add_in_order(W sum, const Source& source) {
  if constexpr (kFirst < kEnd) {
    return add_in_order<kFirst + 1, kEnd>(sum + source(kFirst), source);
  }
  return sum;
}

/// The result of an accumulating sum: the sum of the sources is added to the old value.
template <class W>
ZR_HOST_DEVICE ZR_INLINE W accumulated(W old, W sum) {
  return old + sum;
}

}  // namespace
}  // namespace zeroth::kernels
