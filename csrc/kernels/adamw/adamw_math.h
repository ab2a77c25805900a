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

/// m and v after the gradient; the parameter as it is. kL2: add weight decay to the gradient.
template <bool kL2, class V>
ZR_HOST_DEVICE ZR_INLINE AdamWState<V> adamw_moments(const AdamWFactors<V>& f, V sum, AdamWState<V> old) {
  V grad = sum * f.factor;
  if constexpr (kL2) {
    grad = fused(f.l2, old.param, grad);
  }
  const V exp_avg = fused(f.one_minus_beta1, grad - old.exp_avg, old.exp_avg);
  const V exp_avg_sq = fused(f.one_minus_beta2 * grad, grad, f.beta2 * old.exp_avg_sq);
  return {old.param, exp_avg, exp_avg_sq};
}

template <bool kL2, class V>
ZR_HOST_DEVICE ZR_INLINE AdamWState<V> adamw_element(const AdamWFactors<V>& f, V sum, AdamWState<V> old) {
  const AdamWState<V> next = adamw_moments<kL2>(f, sum, old);
  const V denominator = fused(root(next.exp_avg_sq), f.inv_sqrt_correction2, f.eps);
  const V param = fused(f.minus_step_size, next.exp_avg / denominator, old.param * f.decay);
  return {canonical(param), canonical(next.exp_avg), canonical(next.exp_avg_sq)};
}

/// The parameter, where m and v are what they are.
template <class V>
ZR_HOST_DEVICE ZR_INLINE V adamw_frozen(const AdamWFactors<V>& f, AdamWState<V> old) {
  const V denominator = fused(root(old.exp_avg_sq), f.inv_sqrt_correction2, f.eps);
  const V direction = old.exp_avg / denominator * old.exp_avg_sq.sign();
  return canonical(fused(f.minus_step_size, direction, old.param * f.decay));
}

/// Params: see masters.h; T: its Value.
template <class Params, class T>
struct AdamWArrays {
  Params param;
  T* exp_avg;
  T* exp_avg_sq;
  const T* grad;
};

template <class Params, class T = typename Params::Value>
AdamWArrays<Params, T> adamw_arrays(Params param, const AdamWArgs& args) {
  return {param, static_cast<T*>(args.exp_avg), static_cast<T*>(args.exp_avg_sq), static_cast<const T*>(args.grad)};
}

/// Updates the lanes of one vector at element i. kL2: see adamw_element(); kFrozen: there is no gradient.
template <bool kL2, bool kFrozen, class W, class Params, class T>
ZR_HOST_DEVICE ZR_INLINE void adamw_update(const AdamWFactors<W>& factors, const AdamWArrays<Params, T>& a,
                                           std::int64_t i) {
  const AdamWState<W> old{a.param.template load<W>(i), W::load(a.exp_avg + i), W::load(a.exp_avg_sq + i)};
  if constexpr (kFrozen) {
    a.param.store(adamw_frozen(factors, old), i);
    return;
  }
  const AdamWState<W> next = adamw_element<kL2>(factors, W::load(a.grad + i), old);
  a.param.store(next.param, i);
  next.exp_avg.store(a.exp_avg + i);
  next.exp_avg_sq.store(a.exp_avg_sq + i);
}

}  // namespace
}  // namespace zeroth::kernels
