// Memory access of AdamW around adamw_math.h; included once per instruction set.
#include <kernels/adamw/adamw_math.h>
#include <kernels/adamw/adamw_variants.h>
#include <kernels/common/loops.h>
#include <kernels/common/masters.h>

namespace zeroth::kernels {
namespace {

// No software prefetch: on flat arrays with huge pages the hardware keeps up, and measured distances of 2 to
// 4 KiB cost 0 to 10 % (benchmarks/kernels/adamw_bench).
template <class Params, class T>
struct AdamWArrays {
  Params param;
  T* exp_avg;
  T* exp_avg_sq;
  const T* grad;
};

/// Updates the lanes of one vector at element i.
template <bool kL2, class W, class Params, class T>
ZR_INLINE void adamw_update(const AdamWFactors<W>& factors,
                            const AdamWArrays<Params, T>& a,
                            std::int64_t i) {
  const AdamWState<W> old{a.param.template load<W>(i), W::load(a.exp_avg + i), W::load(a.exp_avg_sq + i)};
  const AdamWState<W> next = adamw_element<kL2>(factors, W::load(a.grad + i), old);
  a.param.store(next.param, i);
  next.exp_avg.store(a.exp_avg + i);
  next.exp_avg_sq.store(a.exp_avg_sq + i);
}

template <template <class> class V, class T, class Params, bool kL2>
void adamw_range(const AdamWArgs& args) {
  const AdamWArrays<Params, T> arrays{Params::of(args.param, args.low),
                                      static_cast<T*>(args.exp_avg),
                                      static_cast<T*>(args.exp_avg_sq),
                                      static_cast<const T*>(args.grad)};
  const std::int64_t n = args.n;
  const auto wide = AdamWFactors<V<T>>::from(args.coefficients);
  const auto single = AdamWFactors<Lane<T>>::from(args.coefficients);
  std::int64_t i = 0;
  for (; i + V<T>::kLanes <= n; i += V<T>::kLanes) {
    adamw_update<kL2>(wide, arrays, i);
  }
  for (; i < n; ++i) {
    adamw_update<kL2>(single, arrays, i);
  }
}

template <template <class> class V>
void adamw_any(const AdamWArgs& args) {
  with_flag(args.coefficients.l2 != 0.0, [&](auto l2) {
    if (args.dtype == DType::kFloat64) {
      adamw_range<V, double, WholeParams<double>, l2.kValue>(args);
    } else if (args.low != nullptr) {
      adamw_range<V, float, SplitMasters, l2.kValue>(args);
    } else {
      adamw_range<V, float, WholeParams<float>, l2.kValue>(args);
    }
  });
}

}  // namespace
}  // namespace zeroth::kernels
