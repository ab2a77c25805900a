#include <kernels/common/fp_environment.h>
#include <kernels/signs/signs.h>
#include <kernels/signs/signs_math.h>
#include <kernels/signs/signs_variants.h>
#include <zeroth/base/error.h>

#include <string>

namespace zeroth::kernels {
namespace {

void require(bool holds, const char* what, const char* where, DType dtype) {
  ZR_CHECK(holds, ErrorCode::kUsage, what, ErrorContext{.where = where, .got = std::string(name_of(dtype))});
}

void check(std::int64_t n, DType dtype, const char* op, const char* where, Isa isa) {
  ZR_CHECK(n >= 0, ErrorCode::kUsage, "negative element count", ErrorContext{.where = where});
  require(has_signs(dtype), "signs are taken of float32 or float64", where, dtype);
  detail::require_supported(isa, op);
}

}  // namespace

void sign_message(const SignMessageArgs& args, Isa isa) {
  check(args.n, args.dtype, "sign_message", "kernels.sign_message", isa);
  require(is_sign_message(args.grad_dtype, args.dtype), "a message has no gradients of this dtype",
          "kernels.sign_message", args.grad_dtype);
  const detail::FpEnvironment environment;
  detail::select(isa, detail::sign_message_scalar, detail::sign_message_avx2, detail::sign_message_avx512)(args);
}

void sign_pack(const SignPackArgs& args, Isa isa) {
  check(args.n, args.dtype, "sign_pack", "kernels.sign_pack", isa);
  const detail::FpEnvironment environment;
  detail::select(isa, detail::sign_pack_scalar, detail::sign_pack_avx2, detail::sign_pack_avx512)(args);
}

void sign_sum(const SignSumArgs& args, Isa isa) {
  check(args.n, args.dtype, "sign_sum", "kernels.sign_sum", isa);
  ZR_CHECK(args.num_sources > 0, ErrorCode::kUsage, "a sum of no sources", ErrorContext{.where = "kernels.sign_sum"});
  const detail::FpEnvironment environment;
  detail::select(isa, detail::sign_sum_scalar, detail::sign_sum_avx2, detail::sign_sum_avx512)(args);
}

}  // namespace zeroth::kernels
