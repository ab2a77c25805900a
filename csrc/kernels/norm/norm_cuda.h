// Step 1 of the exact norm (norm.h) on a CUDA device: the order of norm_math.h, so the bits of the CPU
// variants.
#pragma once

#include <zeroth/base/dtype.h>

#include <cstdint>

/// Enqueues the sums of squares of the blocks of 1,024 elements on `stream` (a cudaStream_t). src [n] (fp32,
/// bf16 or fp64, any alignment of the type) and sums [ceil(n / 1024)] are device pointers; every sum is
/// written. A block with an infinite or NaN element, or a sum beyond the range of double, gives infinity or a
/// NaN, it is not said which. Step 2 stays on the host: copy the sums there and call
/// NormAccumulator::add_blocks, which then holds the words that NormAccumulator::add gives. Returns a
/// cudaError_t: 0; cudaErrorInvalidValue for another dtype or n < 0, and nothing is launched; or why the
/// launch failed. Faults of the kernel itself surface at the stream's next synchronisation. Does not block.
extern "C" int zeroth_cuda_norm_blocks(const void* src, zeroth::DType dtype, std::int64_t n, double* sums,
                                       void* stream);
