// SGD on a CUDA device: the arithmetic of sgd_math.h, so it has the bits of the CPU variants.
#pragma once

#include <kernels/sgd/sgd.h>

/// Enqueues sgd_step(args) on `stream` (a cudaStream_t); the pointers of args are device pointers. Returns a
/// cudaError_t: 0; cudaErrorInvalidValue, without a launch, for arguments that sgd_step refuses; or the error of the
/// launch. Faults of the kernel itself surface at the stream's next synchronisation. Does not block.
extern "C" int zeroth_cuda_sgd(const zeroth::kernels::SgdArgs* args, void* stream);
