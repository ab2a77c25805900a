// Conversion of ranges between floating-point types.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {

/// dst[i] = src[i] for n elements, on the calling thread. Pairs (src -> dst): fp32 -> bf16, bf16 -> fp32, fp32 -> fp16,
/// fp16 -> fp32, fp32 -> fp64, bf16 -> fp64, fp64 -> fp32. Narrowing rounds once to nearest even. A NaN stays a NaN
/// (quiet; bf16 -> fp32 keeps its bits). A dst of 256 KiB and more is written with streaming stores, fenced before the
/// return. Pointers need the alignment of their type; the ranges do not overlap. The bits do not depend on the split of
/// a range into calls or on `isa`. Throws Error{kUsage} for another pair (equal types: use copy_stream), n < 0, or an
/// unsupported isa.
void cast_range(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t n, Isa isa);

}  // namespace zeroth::kernels
