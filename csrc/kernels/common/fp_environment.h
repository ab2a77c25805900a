// The floating-point environment of every kernel: round to nearest even, denormals on, no traps.
#pragma once

#include <immintrin.h>

namespace zeroth::kernels::detail {

/// Sets MXCSR to its power-on value and restores the caller's on leaving, exception flags included. Other
/// libraries set flush-to-zero for speed (torch.set_flush_denormal, -ffast-math start-up code); the bits of a
/// step must not depend on that. The guarded arithmetic has to sit in a function of another translation unit:
/// the compiler knows nothing of MXCSR and could move inlined arithmetic out of the guarded region.
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
