#include <kernels/common/fp_environment.h>
#include <kernels/common/update_check.h>
#include <kernels/sgd/sgd.h>
#include <kernels/sgd/sgd_variants.h>
#include <zeroth/base/error.h>

namespace zeroth::kernels {

void sgd_step(const SgdArgs& args, Isa isa) {
  const ErrorContext where{.where = "kernels.sgd"};
  detail::require_update("SGD", args, where);
  ZR_CHECK(args.n == 0 || args.hyper.momentum == 0.0 || args.momentum != nullptr, ErrorCode::kUsage,
           "momentum without a momentum buffer", where);
  detail::require_supported(isa, "sgd");
  const detail::FpEnvironment environment;
  detail::select(isa, detail::sgd_scalar, detail::sgd_avx2, detail::sgd_avx512)(args);
}

}  // namespace zeroth::kernels
