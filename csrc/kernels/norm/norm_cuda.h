// Step 1 of the exact norm (norm.h) on a CUDA device: the order of norm_math.h, so it has the bits of the CPU variants.
#pragma once

#include <zeroth/base/dtype.h>

#include <cstdint>

/// Enqueues the sums of squares of the blocks of 1,024 elements on `stream` (a cudaStream_t). src [n] (fp32, bf16 or
/// fp64, with the alignment of the type) and sums [ceil(n / 1024)] are device pointers; every sum is written. A block
/// with an infinite or NaN element, or a sum beyond the range of double, gives infinity or NaN; which of the two is not
/// specified. Step 2 stays on the host: copy the sums there and call NormAccumulator::add_blocks, with the result of
/// NormAccumulator::add. Returns a cudaError_t: 0; cudaErrorInvalidValue, without a launch, for another dtype or n < 0;
/// or the error of the launch. Faults of the kernel itself surface at the stream's next synchronisation. Does not
/// block.
extern "C" int zeroth_cuda_norm_blocks(const void* src, zeroth::DType dtype, std::int64_t n, double* sums,
                                       void* stream);
