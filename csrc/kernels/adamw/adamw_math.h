// The arithmetic of AdamW for one vector (or lane) of elements: the same text for scalar, AVX2, AVX-512 and
// CUDA.
#pragma once

#include <kernels/adamw/adamw.h>
#include <kernels/common/lane.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// AdamWCoefficients, rounded to the type of the state and spread over the lanes of V.
template <class V>
struct AdamWFactors {
  V factor, l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, minus_step_size;

  ZR_HOST_DEVICE static ZR_INLINE AdamWFactors from(const AdamWCoefficients& c) {
    using T = typename V::Value;
    return {V::splat(static_cast<T>(c.factor)),
            V::splat(static_cast<T>(c.l2)),
            V::splat(static_cast<T>(c.decay)),
            V::splat(static_cast<T>(c.one_minus_beta1)),
            V::splat(static_cast<T>(c.beta2)),
            V::splat(static_cast<T>(c.one_minus_beta2)),
            V::splat(static_cast<T>(c.inv_sqrt_correction2)),
            V::splat(static_cast<T>(c.eps)),
            V::splat(static_cast<T>(-c.step_size))};
  }
};

template <class V>
struct AdamWState {
  V param, exp_avg, exp_avg_sq;
};

/// kL2: weight decay is added to the gradient.
template <bool kL2, class V>
ZR_HOST_DEVICE ZR_INLINE AdamWState<V> adamw_element(const AdamWFactors<V>& f, V sum, AdamWState<V> old) {
  V grad = sum * f.factor;
  if constexpr (kL2) {
    grad = fused(f.l2, old.param, grad);
  }
  const V exp_avg = fused(f.one_minus_beta1, grad - old.exp_avg, old.exp_avg);
  const V exp_avg_sq = fused(f.one_minus_beta2 * grad, grad, f.beta2 * old.exp_avg_sq);
  const V denominator = fused(root(exp_avg_sq), f.inv_sqrt_correction2, f.eps);
  const V param = fused(f.minus_step_size, exp_avg / denominator, old.param * f.decay);
  return {canonical(param), canonical(exp_avg), canonical(exp_avg_sq)};
}

}  // namespace
}  // namespace zeroth::kernels
