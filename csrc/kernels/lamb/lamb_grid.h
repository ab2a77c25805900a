// LAMB on a grid, see common/grid.h. The elements of a block are measured by the threads of a warp, as in norm_grid.h.
#pragma once

#include <kernels/common/grid.h>
#include <kernels/lamb/lamb_math.h>
#include <kernels/norm/norm_math.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// The number of threads is a multiple of kNormLanes.
template <LambPass kPass, class Params>
struct LambMeasureGrid {
  using T = typename Params::Value;
  static constexpr bool kGreatest = kPass == LambPass::kFresh;
  LambArrays<Params, T> arrays;
  LambCoefficients coefficients;
  std::int64_t n;
  double* param_squares;
  double* update_measure;

  /// deliver(block, lane, of p, of u) for every block of the thread's warp: sums of the lane's squares, or the
  /// greatest r in the second.
  template <class Deliver>
  ZR_HOST_DEVICE void operator()(GridThread thread, const Deliver& deliver) const {
    using D = Lane<double>;
    const auto factors = LambFactors<Lane<T>>::from(coefficients);
    const std::int64_t lane = thread.index % kNormLanes;
    const std::int64_t warps = thread.count / kNormLanes;
    const std::int64_t blocks = (n + kNormBlock - 1) / kNormBlock;
    for (std::int64_t block = thread.index / kNormLanes; block < blocks; block += warps) {
      const std::int64_t first = block * kNormBlock;
      const std::int64_t end = n - first < kNormBlock ? n : first + kNormBlock;
      D of_param = D::splat(0.0);
      D of_update = D::splat(0.0);
      for (std::int64_t i = first + lane; i < end; i += kNormLanes) {
        const LambMeasured<Lane<T>> measured = lamb_measured<kPass>(factors, arrays, i);
        if constexpr (kGreatest) {
          of_update = {lamb_greater(of_update.v, static_cast<double>(measured.update.v))};
        } else {
          of_param = norm_added(of_param, D{static_cast<double>(measured.param.v)});
          of_update = norm_added(of_update, D{static_cast<double>(measured.update.v)});
        }
      }
      deliver(block, lane, of_param.v, of_update.v);
    }
  }
};

/// launch(body, threads) folds what the lanes of a block deliver, and writes it to body.param_squares[block] and
/// body.update_measure[block]; with kGreatest to the second alone.
template <class Launch>
bool lamb_measure_on_grid(const LambArgs& args, Launch& launch) {
  if (args.n < 0 || !are_params(args.dtype, args.low, args.master) ||
      (args.n > 0 && args.grad == nullptr && args.last == nullptr)) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  with_params(args.dtype, args.param, args.low, args.master, [&](auto param) {
    with_lamb_pass(args, [&](auto pass) {
      launch(LambMeasureGrid<decltype(pass)::kValue, decltype(param)>{lamb_arrays(param, args), args.coefficients,
                                                                      args.n, args.param_squares, args.update_measure},
             (args.n + kNormBlock - 1) / kNormBlock * kNormLanes);
    });
  });
  return true;
}

template <class Params, int kLanes>
struct LambApplyGrid {
  using T = typename Params::Value;
  LambArrays<Params, T> arrays;
  LambCoefficients coefficients;
  std::int64_t n;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for_each_pack<kLanes>(thread, n, [&](auto lanes, std::int64_t i) {
      lamb_applied(LambFactors<PackOf<T, decltype(lanes)::kValue>>::from(coefficients), arrays, i);
    });
  }
};

template <class Launch>
bool lamb_apply_on_grid(const LambArgs& args, Launch& launch) {
  if (args.n < 0 || !are_params(args.dtype, args.low, args.master)) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  with_params(args.dtype, args.param, args.low, args.master, [&](auto param) {
    const auto arrays = lamb_arrays(param, args);
    const bool packable = is_packable(param) && is_packable(arrays.exp_avg) && is_packable(arrays.exp_avg_sq);
    with_packs(packable, [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::kValue;
      launch(LambApplyGrid<decltype(param), kLanes>{arrays, args.coefficients, args.n}, threads_for<kLanes>(args.n));
    });
  });
  return true;
}

}  // namespace
}  // namespace zeroth::kernels
