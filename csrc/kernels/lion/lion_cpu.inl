// The loop of Lion around lion_math.h; included once per instruction set.
#include <kernels/common/loops.h>
#include <kernels/common/masters.h>
#include <kernels/lion/lion_math.h>
#include <kernels/lion/lion_variants.h>

namespace zeroth::kernels {
namespace {

template <template <class> class V, class Params>
void lion_range(const LionArgs& args, Params param) {
  using T = typename Params::Value;
  const LionArrays<Params, T> arrays = lion_arrays(param, args);
  const std::int64_t n = args.n;
  std::int64_t i = 0;
  const auto wide = LionFactors<V<T>>::from(args.hyper);
  for (; i + V<T>::kLanes <= n; i += V<T>::kLanes) {
    lion_update(wide, arrays, i);
  }
  const auto single = LionFactors<Lane<T>>::from(args.hyper);
  for (; i < n; ++i) {
    lion_update(single, arrays, i);
  }
}

template <template <class> class V>
void lion_any(const LionArgs& args) {
  with_params(args.dtype, args.param, args.low, args.master, [&](auto param) { lion_range<V>(args, param); });
}

}  // namespace
}  // namespace zeroth::kernels
