// The loop of SGD around sgd_math.h; included once per instruction set.
#include <kernels/common/loops.h>
#include <kernels/common/masters.h>
#include <kernels/sgd/sgd_math.h>
#include <kernels/sgd/sgd_variants.h>

namespace zeroth::kernels {
namespace {

template <template <class> class V, class Form, class Params>
void sgd_range(const SgdArgs& args, Params param) {
  using T = typename Params::Value;
  const SgdArrays<Params, T> arrays = sgd_arrays(param, args);
  const std::int64_t n = args.n;
  std::int64_t i = 0;
  const auto wide = SgdFactors<V<T>>::from(args.hyper);
  for (; i + V<T>::kLanes <= n; i += V<T>::kLanes) {
    sgd_update<Form>(wide, arrays, i);
  }
  const auto single = SgdFactors<Lane<T>>::from(args.hyper);
  for (; i < n; ++i) {
    sgd_update<Form>(single, arrays, i);
  }
}

template <template <class> class V>
void sgd_any(const SgdArgs& args) {
  with_params(args.dtype, args.param, args.low, args.master, [&](auto param) {
    with_sgd_form(args.hyper, [&](auto form) { sgd_range<V, decltype(form)>(args, param); });
  });
}

}  // namespace
}  // namespace zeroth::kernels
