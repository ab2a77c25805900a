// Which instruction set a kernel runs with. All of them give the same bits; they differ in speed alone.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace zeroth::kernels {

/// kAvx2 needs AVX2 and FMA, kAvx512 needs F, DQ, BW and VL besides (and an operating system that saves the
/// registers).
enum class Isa : std::uint8_t { kScalar, kAvx2, kAvx512 };

/// The widest instruction set that this processor runs, at most the one that the environment variable ZEROTH_ISA names
/// ("scalar", "avx2", "avx512"; read once). A processor without AVX2 and FMA runs kScalar.
[[nodiscard]] Isa best_isa() noexcept;

/// Throws Error{kEnvironment} if ZEROTH_ISA holds another word, or a set that this processor lacks.
void require_isa_override();

/// True if this processor runs `isa`. Every kernel throws Error{kUsage} when told to use one that is not
/// supported.
[[nodiscard]] bool is_supported(Isa isa) noexcept;

/// "scalar", "avx2", "avx512".
[[nodiscard]] std::string_view name_of(Isa isa) noexcept;

/// For start-up logs: the chosen set and the features that were looked for, "avx512 (avx2 fma avx512f
/// avx512dq avx512bw avx512vl)"; says so if ZEROTH_ISA chose it.
[[nodiscard]] std::string describe_isa();

namespace detail {

/// True if `rep movsb` is as fast as any loop for large ranges (ERMS).
[[nodiscard]] bool has_fast_string_copy() noexcept;

/// Throws Error{kUsage} with `where` = "kernels.<op>" when this processor cannot run `isa`.
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
