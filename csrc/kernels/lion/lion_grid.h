// Lion on a grid, see common/grid.h.
#pragma once

#include <kernels/common/grid.h>
#include <kernels/lion/lion_math.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <class Params, int kLanes>
struct LionGrid {
  using T = typename Params::Value;
  LionArrays<Params, T> arrays;
  LionHyper hyper;
  std::int64_t n;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for_each_pack<kLanes>(thread, n, [&](auto lanes, std::int64_t i) {
      using W = PackOf<T, decltype(lanes)::kValue>;
      lion_update(LionFactors<W>::from(hyper), arrays, i);
    });
  }
};

template <class Launch>
bool lion_on_grid(const LionArgs& args, Launch& launch) {
  if (args.n < 0 || !are_params(args.dtype, args.low, args.master)) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  with_params(args.dtype, args.param, args.low, args.master, [&](auto param) {
    const auto arrays = lion_arrays(param, args);
    const bool packable = is_packable(param) && is_packable(arrays.exp_avg) && is_packable(arrays.grad);
    with_packs(packable, [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::kValue;
      launch(LionGrid<decltype(param), kLanes>{arrays, args.hyper, args.n}, threads_for<kLanes>(args.n));
    });
  });
  return true;
}

}  // namespace
}  // namespace zeroth::kernels
