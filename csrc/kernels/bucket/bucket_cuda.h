// Gradient buckets on a CUDA device: the arithmetic of bucket_math.h, so it has the bits of the CPU variants.
#pragma once

#include <kernels/bucket/bucket_variants.h>

#include <cstdint>

/// Enqueues bucket_add (if args->add) or bucket_store with the members of args on `stream` (a cudaStream_t). dst [n] of
/// dst_dtype and src [n] of src_dtype are device pointers with the alignment of their types, and do not overlap.
/// nonfinite [1] is a device pointer, aligned to 8 bytes: the number of elements of src that are infinite or NaN is
/// added to it atomically, in stream order. Returns a cudaError_t: 0; cudaErrorInvalidValue, without a launch, for a
/// null count and for arguments that bucket_store or bucket_add refuses (the dst_dtype of bucket_add is the
/// accumulation dtype); or the error of the launch. Faults of the kernel itself surface at the stream's next
/// synchronisation. Does not block.
extern "C" int zeroth_cuda_bucket(const zeroth::kernels::detail::BucketArgs* args, std::int64_t* nonfinite,
                                  void* stream);

/// Enqueues fill_zero: sets `bytes` bytes at the device pointer dst to zero. Returns as above; cudaErrorInvalidValue if
/// bytes < 0.
extern "C" int zeroth_cuda_fill_zero(void* dst, std::int64_t bytes, void* stream);
