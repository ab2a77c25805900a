#include "base/planted.h"

#include <kernels/adamw/adamw.h>
#include <kernels/adamw/adamw_variants.h>
#include <kernels/common/fp_environment.h>
#include <kernels/common/update_check.h>
#include <zeroth/base/error.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

namespace zeroth::kernels {
namespace {

/// 1 - base^exponent. Not std::pow: its last bit depends on libm and on which of its variants the processor selects.
/// The power is built by repeated squaring in pairs of doubles (head + tail), so that only the last subtraction rounds
/// visibly. Ref: Dekker: A floating-point technique for extending the available precision, Numerische Mathematik 18,
/// 1971.
double one_minus_power(double base, std::int64_t exponent) {
  struct Pair {
    double head, tail;
  };
  const auto product = [](Pair a, Pair b) {
    const double head = a.head * b.head;
    const double tail = std::fma(a.head, b.head, -head) + (a.head * b.tail + a.tail * b.head);
    const double sum = head + tail;
    return Pair{sum, tail - (sum - head)};
  };
  Pair power{1.0, 0.0};
  Pair square{base, 0.0};
  for (std::int64_t e = exponent; e > 0; e /= 2) {
    if (e % 2 == 1) {
      power = product(power, square);
    }
    square = product(square, square);
  }
  return (1.0 - power.head) - power.tail;
}

AdamWArgs with_planted_fault(AdamWArgs args) {
  args.coefficients.step_size *= 1.0 + 2.0 * static_cast<double>(std::numeric_limits<float>::epsilon());
  return args;
}

}  // namespace

AdamWCoefficients adamw_coefficients(const AdamWHyper& hyper) noexcept {
  AdamWCoefficients c;
  c.factor = hyper.factor;
  c.l2 = hyper.decoupled ? 0.0 : hyper.weight_decay;
  c.decay = hyper.decoupled ? 1.0 - hyper.lr * hyper.weight_decay : 1.0;
  c.one_minus_beta1 = 1.0 - hyper.beta1;
  c.beta2 = hyper.beta2;
  c.one_minus_beta2 = 1.0 - hyper.beta2;
  c.inv_sqrt_correction2 =
      1.0 / std::sqrt(one_minus_power(hyper.beta2, hyper.variance_step > 0 ? hyper.variance_step : hyper.step));
  c.eps = hyper.eps;
  c.step_size = hyper.lr / one_minus_power(hyper.beta1, hyper.step);
  return c;
}

void adamw_step(const AdamWArgs& args, Isa isa) {
  const ErrorContext where{.where = "kernels.adamw"};
  detail::require_update("AdamW", args, where);
  ZR_CHECK(args.grad != nullptr || args.n == 0 || args.coefficients.l2 == 0.0, ErrorCode::kUsage,
           "weight decay in a gradient that is not there", where);
  detail::require_supported(isa, "adamw");
  const detail::FpEnvironment environment;
  const auto kernel = detail::select(isa, detail::adamw_scalar, detail::adamw_avx2, detail::adamw_avx512);
  if (planted("kernel_dispatch")) {
    kernel(isa == Isa::kScalar ? args : with_planted_fault(args));
  } else {
    kernel(args);
  }
}

}  // namespace zeroth::kernels
