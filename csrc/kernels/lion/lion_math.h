// The arithmetic of Lion for one vector (or lane) of elements: the same text for scalar, AVX2, AVX-512 and CUDA.
#pragma once

#include <kernels/common/lane.h>
#include <kernels/lion/lion.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <class V>
struct LionFactors {
  V factor, one_minus_beta1, one_minus_beta2, decay, minus_lr;

  ZR_HOST_DEVICE static ZR_INLINE LionFactors from(const LionHyper& h) {
    using T = typename V::Value;
    return {V::splat(static_cast<T>(h.factor)), V::splat(static_cast<T>(1.0 - h.beta1)),
            V::splat(static_cast<T>(1.0 - h.beta2)), V::splat(static_cast<T>(1.0 - h.lr * h.weight_decay)),
            V::splat(static_cast<T>(-h.lr))};
  }
};

/// Params: see masters.h; T: its Value.
template <class Params, class T>
struct LionArrays {
  Params param;
  T* exp_avg;
  const T* grad;
};

template <class Params, class T = typename Params::Value>
LionArrays<Params, T> lion_arrays(Params param, const LionArgs& args) {
  return {param, static_cast<T*>(args.exp_avg), static_cast<const T*>(args.grad)};
}

/// Updates the lanes of one vector at element i.
template <class W, class Params, class T>
ZR_HOST_DEVICE ZR_INLINE void lion_update(const LionFactors<W>& f, const LionArrays<Params, T>& a, std::int64_t i) {
  const W old = a.param.template load<W>(i);
  const W average = W::load(a.exp_avg + i);
  const W fresh = W::load(a.grad + i) * f.factor - average;
  const W direction = fused(f.one_minus_beta1, fresh, average).sign();
  a.param.store(canonical(fused(f.minus_lr, direction, old * f.decay)), i);
  canonical(fused(f.one_minus_beta2, fresh, average)).store(a.exp_avg + i);
}

}  // namespace
}  // namespace zeroth::kernels
