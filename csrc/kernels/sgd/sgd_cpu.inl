// Memory access of SGD around sgd_math.h; included once per instruction set.
#include <kernels/common/loops.h>
#include <kernels/sgd/sgd_math.h>
#include <kernels/sgd/sgd_variants.h>

namespace zeroth::kernels {
namespace {

enum class Momentum { kNone, kFirstStep, kLaterStep };

template <template <class> class V, class T, Momentum kMomentum>
void sgd_range(const SgdArgs& args) {
  T* const param = static_cast<T*>(args.param);
  T* const momentum = static_cast<T*>(args.momentum);
  const T* const grad = static_cast<const T*>(args.grad);
  BFloat16* const copy_out = args.copy_out;
  const auto update = [&](const auto& factors, auto width, std::int64_t i) {
    using W = typename decltype(width)::Vector;
    const W old = W::load(param + i);
    W direction = sgd_gradient(factors, W::load(grad + i), old);
    if constexpr (kMomentum != Momentum::kNone) {
      W buffer = direction;
      if constexpr (kMomentum == Momentum::kLaterStep) {
        buffer = sgd_momentum(factors, direction, W::load(momentum + i));
      }
      direction = sgd_direction(factors, direction, buffer);
      canonical(buffer).store(momentum + i);
    }
    const W next = canonical(sgd_param(factors, direction, old));
    next.store(param + i);
    if constexpr (sizeof(T) == sizeof(float)) {
      if (copy_out != nullptr) {
        next.store(copy_out + i);
      }
    }
  };
  std::int64_t i = 0;
  const auto wide = SgdFactors<V<T>>::from(args.hyper);
  for (; i + V<T>::kLanes <= args.n; i += V<T>::kLanes) {
    update(wide, Width<V<T>>{}, i);
  }
  const auto single = SgdFactors<Lane<T>>::from(args.hyper);
  for (; i < args.n; ++i) {
    update(single, Width<Lane<T>>{}, i);
  }
}

template <template <class> class V, class T>
void sgd_typed(const SgdArgs& args) {
  if (args.hyper.momentum == 0.0) {
    sgd_range<V, T, Momentum::kNone>(args);
  } else if (args.hyper.first_step) {
    sgd_range<V, T, Momentum::kFirstStep>(args);
  } else {
    sgd_range<V, T, Momentum::kLaterStep>(args);
  }
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
