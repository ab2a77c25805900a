#include <kernels/common/fp_environment.h>
#include <kernels/sgd/sgd.h>
#include <kernels/sgd/sgd_variants.h>
#include <zeroth/base/error.h>

namespace zeroth::kernels {

void sgd_step(const SgdArgs& args, Isa isa) {
  const ErrorContext where{.where = "kernels.sgd"};
  ZR_CHECK(args.n >= 0, ErrorCode::kUsage, "negative element count", where);
  ZR_CHECK(args.dtype == DType::kFloat32 || args.dtype == DType::kFloat64, ErrorCode::kUsage,
           "SGD states are float32 or float64", where);
  ZR_CHECK((args.low == nullptr && args.master == nullptr) || args.dtype == DType::kFloat32, ErrorCode::kUsage,
           "masters of 16-bit parameters are float32", where);
  ZR_CHECK(args.low == nullptr || args.master == nullptr, ErrorCode::kUsage, "masters in halves and whole ones at once",
           where);
  ZR_CHECK(args.n == 0 || args.hyper.momentum == 0.0 || args.momentum != nullptr, ErrorCode::kUsage,
           "momentum without a momentum buffer", where);
  detail::require_supported(isa, "sgd");
  const detail::FpEnvironment environment;
  detail::select(isa, detail::sgd_scalar, detail::sgd_avx2, detail::sgd_avx512)(args);
}

}  // namespace zeroth::kernels
