// One bit an element: signs with one scale, and the error that they leave, which goes into the next message.
//
//   message   c = error + (a momentum + b gradient)
//   packed    q = s sign(c), where sign(0) = sign(-0) = sign(NaN) = +1 and s = ||c|| / sqrt(n)
//   error     c - q
//   sum       (((q0 + q1) + q2) ...) factor + error
//
// A worker packs its message, a server sums what all workers packed, and packs the sum. Refs: Seide et al., "1-Bit
// Stochastic Gradient Descent", Interspeech 2014; Tang et al., "1-bit Adam", ICML 2021, algorithm 1.
//
// Element i is bit i % 8 of byte i / 8; a set bit is +. All run on the calling thread, on float32 or float64, with
// pointers aligned to their type. The bits do not depend on the split of a range into calls, at multiples of 8
// elements, or on `isa`. All throw Error{kUsage} for another dtype, n < 0, or an unsupported isa.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {

/// Elements whose signs are a byte.
inline constexpr std::int64_t kSignGroup = 8;
/// Bytes of the signs of n elements.
[[nodiscard]] constexpr std::int64_t sign_bytes(std::int64_t n) noexcept {
  return (n + kSignGroup - 1) / kSignGroup;
}

/// error[i] = error[i] + fma(momentum_factor, momentum[i], grad_factor * grad[i]), each operation rounded once; without
/// momentum error[i] + grad_factor * grad[i]. Factors are rounded to `dtype` first. A NaN is the positive quiet NaN.
struct SignMessageArgs {
  void* error = nullptr;               ///< [n]
  const void* momentum = nullptr;      ///< [n] or null
  const void* grad = nullptr;          ///< [n]
  DType grad_dtype = DType::kFloat32;  ///< `dtype`; for float32 messages also bfloat16 and float16
  std::int64_t n = 0;
  DType dtype = DType::kFloat32;
  double momentum_factor = 0.0;
  double grad_factor = 1.0;
};
void sign_message(const SignMessageArgs& args, Isa isa);

/// Packs the signs of the message that is in `error`, and leaves there what they miss of it.
struct SignPackArgs {
  void* error = nullptr;         ///< [n]: c, then c - q
  std::uint8_t* bits = nullptr;  ///< [sign_bytes(n)]; bits after the last element are 0
  std::int64_t n = 0;
  DType dtype = DType::kFloat32;
  double scale = 0.0;  ///< s, rounded to `dtype`
};
void sign_pack(const SignPackArgs& args, Isa isa);

struct SignSource {
  const std::uint8_t* bits = nullptr;
  double scale = 0.0;  ///< rounded to the dtype of the sum
};

/// dst[i] = (q0 + q1 + ...) * factor [+ error[i]], in the order of the sources. One source and factor 1 unpack it.
struct SignSumArgs {
  void* dst = nullptr;          ///< [n]
  const void* error = nullptr;  ///< [n], null, or dst
  const SignSource* sources = nullptr;
  int num_sources = 0;  ///< 1 or more
  std::int64_t n = 0;
  DType dtype = DType::kFloat32;
  double factor = 1.0;  ///< rounded to `dtype`
};
void sign_sum(const SignSumArgs& args, Isa isa);

}  // namespace zeroth::kernels
