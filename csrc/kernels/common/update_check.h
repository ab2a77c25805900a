// What the kernels of all optimizers ask of their arguments.
#pragma once

#include <zeroth/base/dtype.h>
#include <zeroth/base/error.h>

#include <string>

namespace zeroth::kernels::detail {

/// Throws Error{kUsage} for n < 0, for states that are neither float32 nor float64, and for masters of both kinds or
/// beside others than float32. `args`: with n, dtype, low and master. are_params() says the same of a grid's.
template <class Args>
void require_update(const char* optimizer, const Args& args, const ErrorContext& where) {
  ZR_CHECK(args.n >= 0, ErrorCode::kUsage, "negative element count", where);
  ZR_CHECK(args.dtype == DType::kFloat32 || args.dtype == DType::kFloat64, ErrorCode::kUsage,
           std::string(optimizer) + " states are float32 or float64", where);
  ZR_CHECK((args.low == nullptr && args.master == nullptr) || args.dtype == DType::kFloat32, ErrorCode::kUsage,
           "masters of 16-bit parameters are float32", where);
  ZR_CHECK(args.low == nullptr || args.master == nullptr, ErrorCode::kUsage, "masters in halves and whole ones at once",
           where);
}

}  // namespace zeroth::kernels::detail
