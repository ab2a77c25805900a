// The arithmetic of SGD for one vector (or lane) of elements.
#pragma once

#include <kernels/common/lane.h>
#include <kernels/sgd/sgd.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <class V>
struct SgdFactors {
  V factor, weight_decay, momentum, one_minus_dampening, minus_lr;
  bool has_weight_decay, nesterov;

  static ZR_INLINE SgdFactors from(const SgdHyper& h) {
    using T = typename V::Value;
    return {V::splat(static_cast<T>(h.factor)),
            V::splat(static_cast<T>(h.weight_decay)),
            V::splat(static_cast<T>(h.momentum)),
            V::splat(static_cast<T>(1.0 - h.dampening)),
            V::splat(static_cast<T>(-h.lr)),
            h.weight_decay != 0.0,
            h.nesterov};
  }
};

template <class V>
ZR_INLINE V sgd_gradient(const SgdFactors<V>& f, V sum, V param) {
  const V grad = sum * f.factor;
  return f.has_weight_decay ? fused(f.weight_decay, param, grad) : grad;
}

/// Momentum buffer after any step but the first.
template <class V>
ZR_INLINE V sgd_momentum(const SgdFactors<V>& f, V grad, V buffer) {
  return fused(f.momentum, buffer, f.one_minus_dampening * grad);
}

template <class V>
ZR_INLINE V sgd_direction(const SgdFactors<V>& f, V grad, V buffer) {
  return f.nesterov ? fused(f.momentum, buffer, grad) : buffer;
}

template <class V>
ZR_INLINE V sgd_param(const SgdFactors<V>& f, V direction, V param) {
  return fused(f.minus_lr, direction, param);
}

}  // namespace
}  // namespace zeroth::kernels
