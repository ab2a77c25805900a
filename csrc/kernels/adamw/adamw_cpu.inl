// Memory access of AdamW around adamw_math.h; included once per instruction set.
#include <kernels/adamw/adamw_math.h>
#include <kernels/adamw/adamw_variants.h>
#include <kernels/common/loops.h>

namespace zeroth::kernels {
namespace {

template <template <class> class V, class T, bool kCopyOut>
void adamw_range(const AdamWArgs& args) {
  T* const param = static_cast<T*>(args.param);
  T* const exp_avg = static_cast<T*>(args.exp_avg);
  T* const exp_avg_sq = static_cast<T*>(args.exp_avg_sq);
  const T* const grad = static_cast<const T*>(args.grad);
  const auto update = [&](const auto& factors, auto width, std::int64_t i) {
    using W = typename decltype(width)::Vector;
    const AdamWState<W> next = adamw_element(
        factors, W::load(grad + i), {W::load(param + i), W::load(exp_avg + i), W::load(exp_avg_sq + i)});
    next.param.store(param + i);
    next.exp_avg.store(exp_avg + i);
    next.exp_avg_sq.store(exp_avg_sq + i);
    if constexpr (kCopyOut) {
      next.param.store(args.copy_out + i);
    }
  };
  std::int64_t i = 0;
  const auto wide = AdamWFactors<V<T>>::from(args.coefficients);
  for (; i + V<T>::kLanes <= args.n; i += V<T>::kLanes) {
    update(wide, Width<V<T>>{}, i);
  }
  const auto single = AdamWFactors<Lane<T>>::from(args.coefficients);
  for (; i < args.n; ++i) {
    update(single, Width<Lane<T>>{}, i);
  }
}

template <template <class> class V>
void adamw_any(const AdamWArgs& args) {
  if (args.dtype == DType::kFloat64) {
    adamw_range<V, double, false>(args);
  } else if (args.copy_out != nullptr) {
    adamw_range<V, float, true>(args);
  } else {
    adamw_range<V, float, false>(args);
  }
}

}  // namespace
}  // namespace zeroth::kernels
