// Gradient buckets: the first gradient of a parameter is stored, later ones are added; both look for
// infinities and NaN on the way.
//
//   bucket_store: dst[i] = src[i]        bucket_add: dst[i] = dst[i] + src[i]
//
// dst has the accumulation dtype of src: fp32 for fp32 and bf16 sources, fp64 for fp64. bucket_store also
// keeps bf16 as it is. Sources may have any alignment of their type. Both run on the calling thread; every
// split of a range into calls and every `isa` gives the same bits.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {

/// Copies n elements, widened to `dst_dtype`: src's own or its accumulation dtype. The bits of an element of
/// the same dtype are kept; of a bf16 NaN in a bf16 bucket all but that it becomes quiet.
/// Returns how many elements of src are infinite or NaN.
/// Ranges of 256 KiB and more are written past the caches (streaming stores, fenced before the return), so
/// that a bucket that nobody reads soon costs no read of its old content. dst and src do not overlap. Throws
/// Error{kUsage}: src dtype not floating, another dst dtype, n < 0, unsupported isa.
[[nodiscard]] std::int64_t bucket_store(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t n,
                                        Isa isa);

/// Adds n elements with cast, one rounding an element; a NaN result is the positive quiet NaN.
/// Returns how many elements of src (not of the sum) are infinite or NaN. Errors as above.
[[nodiscard]] std::int64_t bucket_add(void* dst, const void* src, DType src_dtype, std::int64_t n, Isa isa);

/// Writes zeros over `bytes` bytes, streaming from 256 KiB on. Throws Error{kUsage}: unsupported isa.
void fill_zero(void* dst, std::int64_t bytes, Isa isa);

}  // namespace zeroth::kernels
