// The floating-point environment of every kernel: round to nearest even, denormals on, no traps.
#pragma once

#include <immintrin.h>

namespace zeroth::kernels::detail {

/// Sets MXCSR to its power-on value, and restores the caller's value, with exception flags, in the destructor. Other
/// libraries set flush-to-zero for speed (torch.set_flush_denormal, -ffast-math start-up code), and the bits of a step
/// must not depend on that. The guarded arithmetic must be in a function of another translation unit: the compiler does
/// not track MXCSR and could move inlined arithmetic out of the guarded region.
class FpEnvironment {
 public:
  FpEnvironment() noexcept : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~FpEnvironment() { _mm_setcsr(saved_); }
  FpEnvironment(const FpEnvironment&) = delete;
  FpEnvironment& operator=(const FpEnvironment&) = delete;

 private:
  static constexpr unsigned kDefault = 0x1f80;
  unsigned saved_;
};

}  // namespace zeroth::kernels::detail
