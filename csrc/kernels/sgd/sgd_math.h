// The arithmetic of SGD for one vector (or lane) of elements.
#pragma once

#include <kernels/common/lane.h>
#include <kernels/sgd/sgd.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <class V>
struct SgdFactors {
  V factor, weight_decay, momentum, one_minus_dampening, minus_lr;

  static ZR_INLINE SgdFactors from(const SgdHyper& h) {
    using T = typename V::Value;
    return {V::splat(static_cast<T>(h.factor)),
            V::splat(static_cast<T>(h.weight_decay)),
            V::splat(static_cast<T>(h.momentum)),
            V::splat(static_cast<T>(1.0 - h.dampening)),
            V::splat(static_cast<T>(-h.lr))};
  }
};

template <class V>
ZR_INLINE V sgd_decayed(const SgdFactors<V>& f, V grad, V param) {
  return fused(f.weight_decay, param, grad);
}

/// Momentum buffer after any step but the first.
template <class V>
ZR_INLINE V sgd_momentum(const SgdFactors<V>& f, V grad, V buffer) {
  return fused(f.momentum, buffer, f.one_minus_dampening * grad);
}

template <class V>
ZR_INLINE V sgd_nesterov(const SgdFactors<V>& f, V grad, V buffer) {
  return fused(f.momentum, buffer, grad);
}

template <class V>
ZR_INLINE V sgd_param(const SgdFactors<V>& f, V direction, V param) {
  return fused(f.minus_lr, direction, param);
}

}  // namespace
}  // namespace zeroth::kernels
