// The instruction set of a kernel. All of them give the same bits and differ only in speed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace zeroth::kernels {

/// kAvx2 needs AVX2 and FMA; kAvx512 also needs F, DQ, BW and VL (and an operating system that saves the registers).
enum class Isa : std::uint8_t { kScalar, kAvx2, kAvx512 };

/// The widest instruction set that this processor supports, limited by the environment variable ZEROTH_ISA ("scalar",
/// "avx2", "avx512"; read once). kScalar on a processor without AVX2 and FMA.
[[nodiscard]] Isa best_isa() noexcept;

/// Throws Error{kEnvironment} if ZEROTH_ISA has another value, or a set that this processor does not support.
void require_isa_override();

/// True if this processor supports `isa`. Every kernel throws Error{kUsage} for an unsupported one.
[[nodiscard]] bool is_supported(Isa isa) noexcept;

/// "scalar", "avx2", "avx512".
[[nodiscard]] std::string_view name_of(Isa isa) noexcept;

/// Text for start-up logs: the chosen set and the detected features, "avx512 (avx2 fma avx512f avx512dq avx512bw
/// avx512vl)", and a note if ZEROTH_ISA chose it.
[[nodiscard]] std::string describe_isa();

namespace detail {

/// True if `rep movsb` is as fast as any loop for large ranges (ERMS).
[[nodiscard]] bool has_fast_string_copy() noexcept;

/// Throws Error{kUsage} with `where` = "kernels.<op>" if this processor does not support `isa`.
void require_supported(Isa isa, const char* op);

/// The variant of a kernel for `isa`.
template <class Function>
[[nodiscard]] Function* select(Isa isa, Function* scalar, Function* avx2, Function* avx512) noexcept {
  switch (isa) {
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      return avx2;
    case Isa::kScalar:
      break;
  }
  return scalar;
}

}  // namespace detail
}  // namespace zeroth::kernels
