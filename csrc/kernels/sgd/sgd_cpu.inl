// Memory access of SGD around sgd_math.h; included once per instruction set.
#include <kernels/common/loops.h>
#include <kernels/common/masters.h>
#include <kernels/sgd/sgd_math.h>
#include <kernels/sgd/sgd_variants.h>

namespace zeroth::kernels {
namespace {

enum class Momentum { kNone, kFirstStep, kLaterStep };

/// What differs between the loops; never a branch inside one.
template <Momentum kMomentumKind, bool kNesterovForm, bool kDecayOn>
struct SgdForm {
  static constexpr Momentum kMomentum = kMomentumKind;
  static constexpr bool kNesterov = kNesterovForm;
  static constexpr bool kDecay = kDecayOn;
};

template <template <class> class V, class T, class Params, class Form>
void sgd_range(const SgdArgs& args) {
  const Params param = Params::of(args.param, args.low);
  T* const momentum = static_cast<T*>(args.momentum);
  const T* const grad = static_cast<const T*>(args.grad);
  const std::int64_t n = args.n;
  const auto update = [&](const auto& factors, auto width, std::int64_t i) {
    using W = typename decltype(width)::Vector;
    const W old = param.template load<W>(i);
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
    param.store(next, i);
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

template <template <class> class V, class T, class Params, Momentum kMomentum, bool kNesterov>
void sgd_with_flags(const SgdArgs& args) {
  with_flag(args.hyper.weight_decay != 0.0, [&](auto decay) {
    sgd_range<V, T, Params, SgdForm<kMomentum, kNesterov, decay.kValue>>(args);
  });
}

template <template <class> class V, class T, class Params>
void sgd_typed(const SgdArgs& args) {
  if (args.hyper.momentum == 0.0) {
    return sgd_with_flags<V, T, Params, Momentum::kNone, false>(args);
  }
  with_flag(args.hyper.nesterov, [&](auto nesterov) {
    if (args.hyper.first_step) {
      sgd_with_flags<V, T, Params, Momentum::kFirstStep, nesterov.kValue>(args);
    } else {
      sgd_with_flags<V, T, Params, Momentum::kLaterStep, nesterov.kValue>(args);
    }
  });
}

template <template <class> class V>
void sgd_any(const SgdArgs& args) {
  if (args.dtype == DType::kFloat64) {
    sgd_typed<V, double, WholeParams<double>>(args);
  } else if (args.low != nullptr) {
    sgd_typed<V, float, SplitMasters>(args);
  } else {
    sgd_typed<V, float, WholeParams<float>>(args);
  }
}

}  // namespace
}  // namespace zeroth::kernels
