#include <kernels/common/fp_environment.h>
#include <kernels/common/update_check.h>
#include <kernels/lion/lion.h>
#include <kernels/lion/lion_variants.h>
#include <zeroth/base/error.h>

namespace zeroth::kernels {

void lion_step(const LionArgs& args, Isa isa) {
  const ErrorContext where{.where = "kernels.lion"};
  detail::require_update("Lion", args, where);
  detail::require_supported(isa, "lion");
  const detail::FpEnvironment environment;
  detail::select(isa, detail::lion_scalar, detail::lion_avx2, detail::lion_avx512)(args);
}

}  // namespace zeroth::kernels
