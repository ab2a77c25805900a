#include <kernels/common/fp_environment.h>
#include <kernels/reduce/extreme.h>
#include <zeroth/base/error.h>

namespace zeroth::kernels {

void extreme_sources(const ExtremeSourcesArgs& args) {
  const ErrorContext where{.where = "kernels.extreme_sources"};
  ZR_CHECK(args.n >= 0, ErrorCode::kUsage, "negative element count", where);
  ZR_CHECK(args.num_sources >= 1, ErrorCode::kUsage, "a minimum or maximum needs at least one source", where);
  const detail::FpEnvironment environment;  // denormals are not zero
  detail::extreme_sources_scalar(args);
}

}  // namespace zeroth::kernels
