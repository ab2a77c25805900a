// The pairs of types of cast_range, and their conversions. On the CPU the loads and stores of lanes and vectors
// convert.
#pragma once

#include <kernels/common/lane.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

constexpr bool is_castable(DType src, DType dst) {
  const bool halves = size_of(src) == 2 && size_of(dst) == 2;
  const bool skips_float =
      (src == DType::kFloat64 && size_of(dst) == 2) || (src == DType::kFloat16 && dst == DType::kFloat64);
  return is_trained(src) && is_trained(dst) && src != dst && !halves && !skips_float;
}

/// WideType: the type of the lanes, which load In and store Out.
template <class WideType, class OutType, class InType>
struct CastTypes {
  using Wide = WideType;
  using Out = OutType;
  using In = InType;
};

/// Calls body(CastTypes<...>{}) for a pair of types that is_castable.
template <class Body>
ZR_INLINE void with_cast_types(DType src, DType dst, const Body& body) {
  const bool to_bf16 = dst == DType::kBFloat16;
  const bool to_fp16 = dst == DType::kFloat16;
  const bool to_fp32 = dst == DType::kFloat32;
  switch (src) {
    case DType::kFloat64:
      return body(CastTypes<double, float, double>{});
    case DType::kBFloat16:
      return to_fp32 ? body(CastTypes<float, float, BFloat16>{}) : body(CastTypes<double, double, BFloat16>{});
    case DType::kFloat16:
      return body(CastTypes<float, float, Float16>{});
    default:
      if (to_fp16) return body(CastTypes<float, Float16, float>{});
      return to_bf16 ? body(CastTypes<float, BFloat16, float>{}) : body(CastTypes<double, double, float>{});
  }
}

// A GPU's own conversions between fp32 and fp64 may change the bits of a NaN. x86 keeps its sign and payload and makes
// it quiet, so this code does the same by hand.
ZR_HOST_DEVICE ZR_INLINE double widened(float x) {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint64_t nan = (static_cast<std::uint64_t>(bits & 0x80000000U) << 32U) | kQuietNan64 |
                            (static_cast<std::uint64_t>(bits & 0x7fffffU) << 29U);
  return x != x ? __builtin_bit_cast(double, nan) : static_cast<double>(x);
}
ZR_HOST_DEVICE ZR_INLINE float narrowed(double x) {
  const auto bits = __builtin_bit_cast(std::uint64_t, x);
  const std::uint32_t nan = (static_cast<std::uint32_t>(bits >> 32U) & 0x80000000U) | kQuietNan32 |
                            (static_cast<std::uint32_t>(bits >> 29U) & 0x7fffffU);
  return x != x ? __builtin_bit_cast(float, nan) : static_cast<float>(x);
}

/// One element on a device.
ZR_HOST_DEVICE ZR_INLINE void cast_element(const double* src, float* dst) {
  *dst = narrowed(*src);
}
template <class In>
ZR_HOST_DEVICE ZR_INLINE void cast_element(const In* src, double* dst) {
  *dst = widened(Lane<float>::load(src).v);
}
template <class In, class Out>
ZR_HOST_DEVICE ZR_INLINE void cast_element(const In* src, Out* dst) {
  Lane<float>::load(src).store(dst);
}

}  // namespace
}  // namespace zeroth::kernels
