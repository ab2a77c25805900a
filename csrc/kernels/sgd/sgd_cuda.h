// SGD on a CUDA device: the arithmetic of sgd_math.h, so the bits of the CPU variants.
#pragma once

#include <kernels/sgd/sgd.h>

/// Enqueues sgd_step(args) on `stream` (a cudaStream_t); the pointers of args are device pointers. Returns a
/// cudaError_t: 0; cudaErrorInvalidValue for what sgd_step refuses, and nothing is launched; or why the
/// launch failed. Faults of the kernel itself surface at the stream's next synchronisation. Does not block.
extern "C" int zeroth_cuda_sgd(const zeroth::kernels::SgdArgs* args, void* stream);
