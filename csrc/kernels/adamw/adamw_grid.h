// AdamW on a grid, see common/grid.h.
#pragma once

#include <kernels/adamw/adamw_math.h>
#include <kernels/common/grid.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <bool kL2, bool kFrozen, class Params, int kLanes>
struct AdamWGrid {
  using T = typename Params::Value;
  AdamWArrays<Params, T> arrays;
  AdamWCoefficients coefficients;
  std::int64_t n;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for_each_pack<kLanes>(thread, n, [&](auto lanes, std::int64_t i) {
      using W = PackOf<T, decltype(lanes)::kValue>;
      adamw_update<kL2, kFrozen>(AdamWFactors<W>::from(coefficients), arrays, i);
    });
  }
};

template <class Launch>
bool adamw_on_grid(const AdamWArgs& args, Launch& launch) {
  if (args.n < 0 || !are_params(args.dtype, args.low, args.master) ||
      (args.grad == nullptr && args.n > 0 && args.coefficients.l2 != 0.0)) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  with_params(args.dtype, args.param, args.low, args.master, [&](auto param) {
    const auto arrays = adamw_arrays(param, args);
    const bool packable =
        is_packable(param) && is_packable(arrays.exp_avg) && is_packable(arrays.exp_avg_sq) && is_packable(arrays.grad);
    const auto run = [&](auto l2, auto frozen) {
      with_packs(packable, [&](auto lanes) {
        constexpr int kLanes = decltype(lanes)::kValue;
        launch(
            AdamWGrid<decltype(l2)::kValue, decltype(frozen)::kValue, decltype(param), kLanes>{
                arrays, args.coefficients, args.n},
            threads_for<kLanes>(args.n));
      });
    };
    if (args.grad == nullptr) return run(No{}, Yes{});
    with_flag(args.coefficients.l2 != 0.0, [&](auto l2) { run(l2, No{}); });
  });
  return true;
}

}  // namespace
}  // namespace zeroth::kernels
