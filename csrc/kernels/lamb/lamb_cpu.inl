// The loops of LAMB around lamb_math.h; included once per instruction set.
#include <kernels/common/loops.h>
#include <kernels/common/masters.h>
#include <kernels/lamb/lamb_math.h>
#include <kernels/lamb/lamb_variants.h>
#include <kernels/norm/norm_math.h>

namespace zeroth::kernels {
namespace {

/// Of numbers that lie in the first cache; independent comparisons, whose order changes nothing.
template <class T>
double greatest_of(const T* values) {
  constexpr std::int64_t kChains = 8;
  double most[kChains] = {};
  for (std::int64_t i = 0; i < kNormBlock; i += kChains) {
    for (std::int64_t k = 0; k < kChains; ++k) most[k] = lamb_greater(most[k], static_cast<double>(values[i + k]));
  }
  for (std::int64_t k = 1; k < kChains; ++k) most[0] = lamb_greater(most[0], most[k]);
  return most[0];
}

template <template <class> class V, LambPass kPass, class Params>
void lamb_measure_range(const LambArgs& args, Params param) {
  using T = typename Params::Value;
  const LambArrays<Params, T> arrays = lamb_arrays(param, args);
  const auto wide = LambFactors<V<T>>::from(args.coefficients);
  const auto single = LambFactors<Lane<T>>::from(args.coefficients);
  alignas(64) T weights[kNormBlock];
  alignas(64) T updates[kNormBlock];
  std::int64_t block = 0;
  for (std::int64_t first = 0; first < args.n; first += kNormBlock, ++block) {
    const std::int64_t n = args.n - first < kNormBlock ? args.n - first : kNormBlock;
    const auto keep = [&](const auto& measured, std::int64_t i) {
      if constexpr (kPass != LambPass::kFresh) measured.param.store(weights + i);
      measured.update.store(updates + i);
    };
    std::int64_t i = 0;
    for (; i + V<T>::kLanes <= n; i += V<T>::kLanes) keep(lamb_measured<kPass>(wide, arrays, first + i), i);
    for (; i < n; ++i) keep(lamb_measured<kPass>(single, arrays, first + i), i);
    for (; i < kNormBlock; ++i) weights[i] = updates[i] = T{0};
    if constexpr (kPass == LambPass::kFresh) {
      args.update_measure[block] = greatest_of(updates);
    } else {
      args.param_squares[block] = norm_block<V<double>>(weights);
      args.update_measure[block] = norm_block<V<double>>(updates);
    }
  }
}

template <template <class> class V>
void lamb_measure_any(const LambArgs& args) {
  with_params(args.dtype, args.param, args.low, args.master, [&](auto param) {
    with_lamb_pass(args, [&](auto pass) { lamb_measure_range<V, decltype(pass)::kValue>(args, param); });
  });
}

template <template <class> class V>
void lamb_apply_any(const LambArgs& args) {
  with_params(args.dtype, args.param, args.low, args.master, [&](auto param) {
    using T = typename decltype(param)::Value;
    const auto arrays = lamb_arrays(param, args);
    const auto wide = LambFactors<V<T>>::from(args.coefficients);
    const auto single = LambFactors<Lane<T>>::from(args.coefficients);
    std::int64_t i = 0;
    for (; i + V<T>::kLanes <= args.n; i += V<T>::kLanes) lamb_applied(wide, arrays, i);
    for (; i < args.n; ++i) lamb_applied(single, arrays, i);
  });
}

}  // namespace
}  // namespace zeroth::kernels
