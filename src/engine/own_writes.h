// Values that somebody else than the update has written to parameters of 16 bits: their masters take them.
#pragma once

#include "zero/model_memory.h"

#include <zeroth/compute/kernels.h>

#include <cstdint>

namespace zeroth {

/// [Note: Writes to parameters of 16 bits] A caller may write to parameters at rest between two updates, as by weight
/// clipping. In fp32 and fp64 the update then reads what was written. In 16 bits it reads the master, and the write
/// would be lost. So before masters are read:
///   fp16  an element that is not the rounding of its master becomes its master. All other masters keep their bits.
///   bf16  the parameter is the upper half of its master ([Note: Masters in two halves]): it has been taken, and the
///         lower half, which is that of the value before, adds at most half a unit in the last place of bf16. Where
///         both halves together would be a NaN though the parameter is none (a zero, an infinity), the lower half
///         becomes 0.
///
/// For n elements of the view from `element` on, on the calling thread, for for_ranges(). Reads 6 bytes an element for
/// fp16, 4 for bf16. Nothing for other dtypes.
void take_writes(const StateView& view, std::byte* param, std::int64_t element, std::int64_t n, Kernels& kernels,
                 const Stream& stream);

}  // namespace zeroth
