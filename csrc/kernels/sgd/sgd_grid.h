// SGD on a grid, see common/grid.h.
#pragma once

#include <kernels/common/grid.h>
#include <kernels/sgd/sgd_math.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <class Form, class Params, int kLanes>
struct SgdGrid {
  using T = typename Params::Value;
  SgdArrays<Params, T> arrays;
  SgdHyper hyper;
  std::int64_t n;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for_each_pack<kLanes>(thread, n, [&](auto lanes, std::int64_t i) {
      using W = PackOf<T, decltype(lanes)::kValue>;
      sgd_update<Form>(SgdFactors<W>::from(hyper), arrays, i);
    });
  }
};

template <class Launch>
bool sgd_on_grid(const SgdArgs& args, Launch& launch) {
  if (args.n < 0 || !are_params(args.dtype, args.low, args.master) ||
      (args.n > 0 && args.hyper.momentum != 0.0 && args.momentum == nullptr)) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  with_params(args.dtype, args.param, args.low, args.master, [&](auto param) {
    const auto arrays = sgd_arrays(param, args);
    const bool packable = is_packable(param) && is_packable(arrays.momentum) && is_packable(arrays.grad);
    with_sgd_form(args.hyper, [&](auto form) {
      with_packs(packable, [&](auto lanes) {
        constexpr int kLanes = decltype(lanes)::kValue;
        launch(SgdGrid<decltype(form), decltype(param), kLanes>{arrays, args.hyper, args.n},
               threads_for<kLanes>(args.n));
      });
    });
  });
  return true;
}

}  // namespace
}  // namespace zeroth::kernels
