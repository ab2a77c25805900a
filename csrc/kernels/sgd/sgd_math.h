// The arithmetic of SGD for one vector (or lane) of elements: the same text for scalar, AVX2, AVX-512 and
// CUDA.
#pragma once

#include <kernels/common/lane.h>
#include <kernels/common/select.h>
#include <kernels/sgd/sgd.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <class V>
struct SgdFactors {
  V factor, weight_decay, momentum, one_minus_dampening, minus_lr;

  ZR_HOST_DEVICE static ZR_INLINE SgdFactors from(const SgdHyper& h) {
    using T = typename V::Value;
    return {V::splat(static_cast<T>(h.factor)), V::splat(static_cast<T>(h.weight_decay)),
            V::splat(static_cast<T>(h.momentum)), V::splat(static_cast<T>(1.0 - h.dampening)),
            V::splat(static_cast<T>(-h.lr))};
  }
};

enum class Momentum { kNone, kFirstStep, kLaterStep };

/// The variants of the loop; they are template arguments, so no loop has a branch inside.
template <Momentum kMomentumKind, bool kNesterovForm, bool kDecayOn>
struct SgdForm {
  static constexpr Momentum kMomentum = kMomentumKind;
  static constexpr bool kNesterov = kNesterovForm;
  static constexpr bool kDecay = kDecayOn;
};

/// Calls body(SgdForm<...>{}) with the form for `hyper`.
template <class Body>
ZR_INLINE void with_sgd_form(const SgdHyper& hyper, const Body& body) {
  with_flag(hyper.weight_decay != 0.0, [&](auto decay) {
    constexpr bool kDecay = decltype(decay)::kValue;
    if (hyper.momentum == 0.0) {
      return body(SgdForm<Momentum::kNone, false, kDecay>{});
    }
    with_flag(hyper.nesterov, [&](auto nesterov) {
      constexpr bool kNesterov = decltype(nesterov)::kValue;
      if (hyper.first_step) {
        body(SgdForm<Momentum::kFirstStep, kNesterov, kDecay>{});
      } else {
        body(SgdForm<Momentum::kLaterStep, kNesterov, kDecay>{});
      }
    });
  });
}

/// Params: see masters.h; T: its Value.
template <class Params, class T>
struct SgdArrays {
  Params param;
  T* momentum;
  const T* grad;
};

template <class Params, class T = typename Params::Value>
SgdArrays<Params, T> sgd_arrays(Params param, const SgdArgs& args) {
  return {param, static_cast<T*>(args.momentum), static_cast<const T*>(args.grad)};
}

/// Updates the lanes of one vector at element i.
template <class Form, class W, class Params, class T>
ZR_HOST_DEVICE ZR_INLINE void sgd_update(const SgdFactors<W>& f, const SgdArrays<Params, T>& a, std::int64_t i) {
  const W old = a.param.template load<W>(i);
  W direction = W::load(a.grad + i) * f.factor;
  if constexpr (Form::kDecay) {
    direction = fused(f.weight_decay, old, direction);
  }
  if constexpr (Form::kMomentum != Momentum::kNone) {
    W buffer = direction;
    if constexpr (Form::kMomentum == Momentum::kLaterStep) {
      buffer = fused(f.momentum, W::load(a.momentum + i), f.one_minus_dampening * direction);
    }
    canonical(buffer).store(a.momentum + i);
    if constexpr (Form::kNesterov) {
      direction = fused(f.momentum, buffer, direction);
    } else {
      direction = buffer;
    }
  }
  a.param.store(canonical(fused(f.minus_lr, direction, old)), i);
}

}  // namespace
}  // namespace zeroth::kernels
