// The arithmetic of LAMB for one vector (or lane) of elements: the same text for scalar, AVX2, AVX-512 and CUDA.
#pragma once

#include <kernels/adamw/adamw_math.h>
#include <kernels/lamb/lamb.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <class V>
struct LambFactors {
  AdamWFactors<V> adam;
  V minus_beta1, inv_one_minus_beta1, inv_correction1, inv_sqrt_correction2, weight_decay;

  ZR_HOST_DEVICE static ZR_INLINE LambFactors from(const LambCoefficients& c) {
    using T = typename V::Value;
    return {AdamWFactors<V>::from(c.adam),
            V::splat(static_cast<T>(-c.beta1)),
            V::splat(static_cast<T>(c.inv_one_minus_beta1)),
            V::splat(static_cast<T>(c.inv_correction1)),
            V::splat(static_cast<T>(c.inv_sqrt_correction2)),
            V::splat(static_cast<T>(c.weight_decay))};
  }
};

/// Params: see masters.h; T: its Value.
template <class Params, class T>
struct LambArrays {
  Params param;
  T* exp_avg;
  T* exp_avg_sq;
  T* last;
  T* fresh;
  const T* grad;
};

template <class Params, class T = typename Params::Value>
LambArrays<Params, T> lamb_arrays(Params param, const LambArgs& args) {
  return {param,
          static_cast<T*>(args.exp_avg),
          static_cast<T*>(args.exp_avg_sq),
          static_cast<T*>(args.last),
          static_cast<T*>(args.fresh),
          static_cast<const T*>(args.grad)};
}

/// What lamb_measure() does.
enum class LambPass {
  kMoments,  ///< of a gradient
  kKept,     ///< the same, and copies of them
  kFresh,    ///< without a gradient
};

template <class V>
struct LambMeasured {
  V param, update;  ///< with kFresh `update` is r
};

/// u.
template <class V>
ZR_HOST_DEVICE ZR_INLINE V lamb_direction(const LambFactors<V>& f, V param, V exp_avg, V exp_avg_sq) {
  const V denominator = fused(root(exp_avg_sq), f.adam.inv_sqrt_correction2, f.adam.eps);
  return fused(f.weight_decay, param, exp_avg * f.inv_correction1 / denominator * exp_avg_sq.sign());
}

/// Of the lanes of one vector at element i.
template <LambPass kPass, class W, class Params, class T>
ZR_HOST_DEVICE ZR_INLINE LambMeasured<W> lamb_measured(const LambFactors<W>& f, const LambArrays<Params, T>& a,
                                                       std::int64_t i) {
  if constexpr (kPass == LambPass::kFresh) {
    const W exp_avg = W::load(a.exp_avg + i);
    const W exp_avg_sq = W::load(a.exp_avg_sq + i);
    const W grad = fused(f.minus_beta1, W::load(a.last + i), exp_avg) * f.inv_one_minus_beta1;
    const W fresh = canonical(fused(f.adam.one_minus_beta2 * grad, grad, f.adam.beta2 * W::load(a.fresh + i)));
    exp_avg.store(a.last + i);
    fresh.store(a.fresh + i);
    const W frozen = fused(root(exp_avg_sq), f.adam.inv_sqrt_correction2, f.adam.eps);
    return {exp_avg, frozen / fused(root(fresh), f.inv_sqrt_correction2, f.adam.eps) * exp_avg_sq.sign()};
  } else {
    const AdamWState<W> old{a.param.template load<W>(i), W::load(a.exp_avg + i), W::load(a.exp_avg_sq + i)};
    const AdamWState<W> next = adamw_moments<false>(f.adam, W::load(a.grad + i), old);
    const W exp_avg = canonical(next.exp_avg);
    const W exp_avg_sq = canonical(next.exp_avg_sq);
    exp_avg.store(a.exp_avg + i);
    exp_avg_sq.store(a.exp_avg_sq + i);
    if constexpr (kPass == LambPass::kKept) {
      exp_avg.store(a.last + i);
      exp_avg_sq.store(a.fresh + i);
    }
    return {old.param, lamb_direction(f, old.param, exp_avg, exp_avg_sq)};
  }
}

/// Updates the lanes of one vector at element i.
template <class W, class Params, class T>
ZR_HOST_DEVICE ZR_INLINE void lamb_applied(const LambFactors<W>& f, const LambArrays<Params, T>& a, std::int64_t i) {
  const W old = a.param.template load<W>(i);
  const W direction = lamb_direction(f, old, W::load(a.exp_avg + i), W::load(a.exp_avg_sq + i));
  a.param.store(canonical(fused(f.adam.minus_step_size, direction, old)), i);
}

/// The greater of two numbers that are not negative, by their bits; a NaN is not greater than anything.
ZR_HOST_DEVICE ZR_INLINE double lamb_greater(double most, double other) {
  constexpr std::int64_t kInfinity = 0x7ff0000000000000;
  const auto bits = __builtin_bit_cast(std::int64_t, other);
  return __builtin_bit_cast(std::int64_t, most) < bits && bits <= kInfinity ? other : most;
}

/// Calls body(Count<kPass>{}) with a type that has the pass of the arguments as kValue.
template <LambPass kPass>
struct LambPassOf {
  static constexpr LambPass kValue = kPass;
};
template <class Body>
ZR_INLINE void with_lamb_pass(const LambArgs& args, const Body& body) {
  if (args.grad == nullptr) return body(LambPassOf<LambPass::kFresh>{});
  if (args.last != nullptr) return body(LambPassOf<LambPass::kKept>{});
  body(LambPassOf<LambPass::kMoments>{});
}

}  // namespace
}  // namespace zeroth::kernels
