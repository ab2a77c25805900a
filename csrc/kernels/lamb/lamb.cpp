#include <kernels/common/fp_environment.h>
#include <kernels/common/update_check.h>
#include <kernels/lamb/lamb.h>
#include <kernels/lamb/lamb_variants.h>
#include <zeroth/base/error.h>

namespace zeroth::kernels {

LambCoefficients lamb_coefficients(const LambHyper& hyper) noexcept {
  const AdamWHyper adam{.lr = 1.0,
                        .beta1 = hyper.beta1,
                        .beta2 = hyper.beta2,
                        .eps = hyper.eps,
                        .factor = hyper.factor,
                        .step = hyper.step};
  AdamWHyper of_variance = adam;
  of_variance.variance_step = hyper.variance_step;
  LambCoefficients c{.adam = adamw_coefficients(of_variance)};
  c.beta1 = hyper.beta1;
  c.inv_one_minus_beta1 = 1.0 / (1.0 - hyper.beta1);
  c.weight_decay = hyper.weight_decay;
  if (hyper.bias_correction) {
    c.inv_correction1 = c.adam.step_size;
    c.inv_sqrt_correction2 = adamw_coefficients(adam).inv_sqrt_correction2;
  } else {
    c.adam.inv_sqrt_correction2 = 1.0;
  }
  c.adam.step_size = 0.0;
  return c;
}

void lamb_measure(const LambArgs& args, Isa isa) {
  const ErrorContext where{.where = "kernels.lamb"};
  detail::require_update("LAMB", args, where);
  ZR_CHECK(args.grad != nullptr || args.last != nullptr || args.n == 0, ErrorCode::kUsage,
           "neither a gradient nor the momenta of the step before", where);
  detail::require_supported(isa, "lamb");
  const detail::FpEnvironment environment;
  detail::select(isa, detail::lamb_measure_scalar, detail::lamb_measure_avx2, detail::lamb_measure_avx512)(args);
}

void lamb_apply(const LambArgs& args, Isa isa) {
  detail::require_update("LAMB", args, {.where = "kernels.lamb"});
  detail::require_supported(isa, "lamb");
  const detail::FpEnvironment environment;
  detail::select(isa, detail::lamb_apply_scalar, detail::lamb_apply_avx2, detail::lamb_apply_avx512)(args);
}

}  // namespace zeroth::kernels
