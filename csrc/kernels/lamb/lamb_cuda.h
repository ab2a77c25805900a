// LAMB on a CUDA device: the arithmetic of lamb_math.h, so it has the bits of the CPU variants.
#pragma once

#include <kernels/lamb/lamb.h>

/// Enqueues lamb_measure(args) on `stream` (a cudaStream_t); the pointers of args are device pointers. Returns a
/// cudaError_t: 0; cudaErrorInvalidValue, without a launch, for arguments that lamb_measure refuses; or the error of
/// the launch. Faults of the kernel itself surface at the stream's next synchronisation. Does not block.
extern "C" int zeroth_cuda_lamb_measure(const zeroth::kernels::LambArgs* args, void* stream);
/// The same of lamb_apply(args).
extern "C" int zeroth_cuda_lamb_apply(const zeroth::kernels::LambArgs* args, void* stream);
