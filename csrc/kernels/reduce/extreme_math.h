// The arithmetic of minima and maxima for one element.
#pragma once

#include <kernels/common/lane.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// bf16 and fp16 are compared as float, which represents all their values.
ZR_HOST_DEVICE ZR_INLINE float read_value(const BFloat16* p) {
  return Lane<float>::load(p).v;
}
ZR_HOST_DEVICE ZR_INLINE float read_value(const Float16* p) {
  return Lane<float>::load(p).v;
}
template <class T>
ZR_HOST_DEVICE ZR_INLINE T read_value(const T* p) {
  return *p;
}

ZR_HOST_DEVICE ZR_INLINE void write_best(float value, BFloat16* p) {
  canonical(Lane<float>{value}).store(p);
}
ZR_HOST_DEVICE ZR_INLINE void write_best(float value, Float16* p) {
  canonical(Lane<float>{value}).store(p);
}
ZR_HOST_DEVICE ZR_INLINE void write_best(float value, float* p) {
  canonical(Lane<float>{value}).store(p);
}
ZR_HOST_DEVICE ZR_INLINE void write_best(double value, double* p) {
  canonical(Lane<double>{value}).store(p);
}
template <class T>
ZR_HOST_DEVICE ZR_INLINE void write_best(T value, T* p) {
  *p = value;
}

/// Calls body(T{}) for the type of `dtype`; returns false for an unknown dtype.
template <class Body>
ZR_INLINE bool with_extreme_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat64:
      return body(double{}), true;
    case DType::kFloat32:
      return body(float{}), true;
    case DType::kBFloat16:
      return body(BFloat16{}), true;
    case DType::kFloat16:
      return body(Float16{}), true;
    case DType::kInt64:
      return body(std::int64_t{}), true;
    case DType::kInt32:
      return body(std::int32_t{}), true;
    case DType::kUInt8:
      return body(std::uint8_t{}), true;
  }
  return false;
}

/// Combines the result so far with the next source's value. A NaN stays NaN.
template <bool kGreatest, class Value>
ZR_HOST_DEVICE ZR_INLINE Value better_of(Value best, Value next) {
  const bool better = kGreatest ? next > best : next < best;
  return better || next != next ? next : best;
}

}  // namespace
}  // namespace zeroth::kernels
