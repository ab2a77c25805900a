// The loop of AdamW around adamw_math.h; included once per instruction set.
#include <kernels/adamw/adamw_math.h>
#include <kernels/adamw/adamw_variants.h>
#include <kernels/common/loops.h>
#include <kernels/common/masters.h>

namespace zeroth::kernels {
namespace {

// No software prefetch: on flat arrays with huge pages the hardware keeps up, and measured distances of 2 to
// 4 KiB cost 0 to 10 % (benchmarks/kernels/adamw_bench).
template <template <class> class V, bool kL2, bool kFrozen, class Params>
void adamw_range(const AdamWArgs& args, Params param) {
  using T = typename Params::Value;
  const AdamWArrays<Params, T> arrays = adamw_arrays(param, args);
  const std::int64_t n = args.n;
  const auto wide = AdamWFactors<V<T>>::from(args.coefficients);
  const auto single = AdamWFactors<Lane<T>>::from(args.coefficients);
  std::int64_t i = 0;
  for (; i + V<T>::kLanes <= n; i += V<T>::kLanes) {
    adamw_update<kL2, kFrozen>(wide, arrays, i);
  }
  for (; i < n; ++i) {
    adamw_update<kL2, kFrozen>(single, arrays, i);
  }
}

template <template <class> class V>
void adamw_any(const AdamWArgs& args) {
  with_params(args.dtype, args.param, args.low, args.master, [&](auto param) {
    if (args.grad == nullptr) return adamw_range<V, false, true>(args, param);
    with_flag(args.coefficients.l2 != 0.0, [&](auto l2) { adamw_range<V, decltype(l2)::kValue, false>(args, param); });
  });
}

}  // namespace
}  // namespace zeroth::kernels
