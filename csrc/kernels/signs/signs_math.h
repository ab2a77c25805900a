// The arithmetic of signs.h for one vector (or lane) of elements, and its types.
#pragma once

#include <kernels/common/lane.h>
#include <kernels/signs/signs.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

constexpr bool has_signs(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64;
}

constexpr bool is_sign_message(DType grad, DType dtype) {
  const bool narrow = grad == DType::kBFloat16 || grad == DType::kFloat16;
  return has_signs(dtype) && (grad == dtype || (narrow && dtype == DType::kFloat32));
}

/// SumType: the type of the lanes, and of messages, errors and sums; InType: of gradients.
template <class SumType, class InType>
struct SignTypes {
  using Sum = SumType;
  using In = InType;
};

/// Calls body(SignTypes<...>{}) for types that are is_sign_message().
template <class Body>
ZR_INLINE void with_sign_types(DType grad, const Body& body) {
  switch (grad) {
    case DType::kFloat64:
      return body(SignTypes<double, double>{});
    case DType::kBFloat16:
      return body(SignTypes<float, BFloat16>{});
    case DType::kFloat16:
      return body(SignTypes<float, Float16>{});
    default:
      return body(SignTypes<float, float>{});
  }
}

/// c, of an error, and what comes new to it.
template <bool kMomentum, class W>
ZR_HOST_DEVICE ZR_INLINE W message_of(W error, W momentum, W grad, W momentum_factor, W grad_factor) {
  W fresh = grad_factor * grad;
  if constexpr (kMomentum) {
    fresh = fused(momentum_factor, momentum, fresh);
  }
  return canonical(error + fresh);
}

/// c - q.
template <class W>
ZR_HOST_DEVICE ZR_INLINE W left_of(W message, unsigned positive, W scale) {
  return canonical(message - W::signed_by(positive, scale));
}

template <class W>
ZR_HOST_DEVICE ZR_INLINE unsigned positive_in(W message) {
  constexpr unsigned kAll = (1U << static_cast<unsigned>(W::kLanes)) - 1U;
  return ~message.below_zero() & kAll;
}

}  // namespace
}  // namespace zeroth::kernels
