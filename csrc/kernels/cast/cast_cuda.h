// cast_range on a CUDA device: the conversions of lane.h, so it has the bits of the CPU variants.
#pragma once

#include <kernels/cast/cast_variants.h>

/// Enqueues cast_range with the members of args on `stream` (a cudaStream_t). dst [n] of dst_dtype and src [n] of
/// src_dtype are device pointers with the alignment of their types, and do not overlap. Returns a cudaError_t: 0;
/// cudaErrorInvalidValue, without a launch, for arguments that cast_range refuses; or the error of the launch. Faults
/// of the kernel itself surface at the stream's next synchronisation. Does not block.
extern "C" int zeroth_cuda_cast(const zeroth::kernels::detail::CastArgs* args, void* stream);
