// Lion on a CUDA device: the arithmetic of lion_math.h, so it has the bits of the CPU variants.
#pragma once

#include <kernels/lion/lion.h>

/// Enqueues lion_step(args) on `stream` (a cudaStream_t); the pointers of args are device pointers. Returns a
/// cudaError_t: 0; cudaErrorInvalidValue, without a launch, for arguments that lion_step refuses; or the error of the
/// launch. Faults of the kernel itself surface at the stream's next synchronisation. Does not block.
extern "C" int zeroth_cuda_lion(const zeroth::kernels::LionArgs* args, void* stream);
