// Memory access of SGD around sgd_math.h; included once per instruction set.
#include <kernels/common/loops.h>
#include <kernels/sgd/sgd_math.h>
#include <kernels/sgd/sgd_variants.h>

namespace zeroth::kernels {
namespace {

enum class Momentum { kNone, kFirstStep, kLaterStep };

/// What differs between the loops; never a branch inside one.
template <Momentum kMomentumKind, bool kNesterovForm, bool kDecayOn, bool kCopyOn>
struct SgdForm {
  static constexpr Momentum kMomentum = kMomentumKind;
  static constexpr bool kNesterov = kNesterovForm;
  static constexpr bool kDecay = kDecayOn;
  static constexpr bool kCopyOut = kCopyOn;
};

template <template <class> class V, class T, class Form>
void sgd_range(const SgdArgs& args) {
  T* const param = static_cast<T*>(args.param);
  T* const momentum = static_cast<T*>(args.momentum);
  const T* const grad = static_cast<const T*>(args.grad);
  BFloat16* const copy_out = args.copy_out;
  const std::int64_t n = args.n;
  const auto update = [&](const auto& factors, auto width, std::int64_t i) {
    using W = typename decltype(width)::Vector;
    const W old = W::load(param + i);
    W direction = W::load(grad + i) * factors.factor;
    if constexpr (Form::kDecay) {
      direction = sgd_decayed(factors, direction, old);
    }
    if constexpr (Form::kMomentum != Momentum::kNone) {
      W buffer = direction;
      if constexpr (Form::kMomentum == Momentum::kLaterStep) {
        buffer = sgd_momentum(factors, direction, W::load(momentum + i));
      }
      canonical(buffer).store(momentum + i);
      if constexpr (Form::kNesterov) {
        direction = sgd_nesterov(factors, direction, buffer);
      } else {
        direction = buffer;
      }
    }
    const W next = canonical(sgd_param(factors, direction, old));
    next.store(param + i);
    if constexpr (Form::kCopyOut) {
      next.store(copy_out + i);
    }
  };
  std::int64_t i = 0;
  const auto wide = SgdFactors<V<T>>::from(args.hyper);
  for (; i + V<T>::kLanes <= n; i += V<T>::kLanes) {
    update(wide, Width<V<T>>{}, i);
  }
  const auto single = SgdFactors<Lane<T>>::from(args.hyper);
  for (; i < n; ++i) {
    update(single, Width<Lane<T>>{}, i);
  }
}

template <template <class> class V, class T, Momentum kMomentum, bool kNesterov>
void sgd_with_flags(const SgdArgs& args) {
  with_flag(args.hyper.weight_decay != 0.0, [&](auto decay) {
    if constexpr (sizeof(T) == sizeof(float)) {
      with_flag(args.copy_out != nullptr, [&](auto copy) {
        sgd_range<V, T, SgdForm<kMomentum, kNesterov, decay.kValue, copy.kValue>>(args);
      });
    } else {
      sgd_range<V, T, SgdForm<kMomentum, kNesterov, decay.kValue, false>>(args);
    }
  });
}

template <template <class> class V, class T>
void sgd_typed(const SgdArgs& args) {
  if (args.hyper.momentum == 0.0) {
    return sgd_with_flags<V, T, Momentum::kNone, false>(args);
  }
  with_flag(args.hyper.nesterov, [&](auto nesterov) {
    if (args.hyper.first_step) {
      sgd_with_flags<V, T, Momentum::kFirstStep, nesterov.kValue>(args);
    } else {
      sgd_with_flags<V, T, Momentum::kLaterStep, nesterov.kValue>(args);
    }
  });
}

template <template <class> class V>
void sgd_any(const SgdArgs& args) {
  if (args.dtype == DType::kFloat64) {
    sgd_typed<V, double>(args);
  } else {
    sgd_typed<V, float>(args);
  }
}

}  // namespace
}  // namespace zeroth::kernels
