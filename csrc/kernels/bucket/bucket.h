// Gradient buckets: the first gradient of a parameter is stored, later ones are added. Both count infinities and NaN.
//
//   bucket_store: dst[i] = src[i]        bucket_add: dst[i] = dst[i] + src[i]
//
// dst has the accumulation dtype of src: fp32 for fp32, bf16 and fp16 sources, fp64 for fp64. bucket_store also stores
// bf16 as bf16 and fp16 as fp16. Pointers need the alignment of their type. Both run on the calling thread. The bits do
// not depend on the split of a range into calls or on `isa`.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {

/// Copies n elements to `dst_dtype`, which is src's dtype or its accumulation dtype. Elements of the same dtype keep
/// their bits, except that a NaN in a 16-bit bucket becomes quiet. Returns the number of elements of src that are
/// infinite or NaN.
/// Ranges of 256 KiB and more are written with streaming stores, fenced before the return. So a bucket that is not read
/// soon costs no read of its old content. dst and src do not overlap. Throws Error{kUsage} for an src dtype that is not
/// floating, another dst dtype, n < 0, or an unsupported isa.
[[nodiscard]] std::int64_t bucket_store(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t n,
                                        Isa isa);

/// Adds n elements, widened to the accumulation dtype, with one rounding per element. A NaN result is the positive
/// quiet NaN. Returns the number of elements of src (not of the sum) that are infinite or NaN. Errors as above.
[[nodiscard]] std::int64_t bucket_add(void* dst, const void* src, DType src_dtype, std::int64_t n, Isa isa);

/// Sets `bytes` bytes to zero, with streaming stores from 256 KiB on. Throws Error{kUsage} for an unsupported isa.
void fill_zero(void* dst, std::int64_t bytes, Isa isa);

}  // namespace zeroth::kernels
