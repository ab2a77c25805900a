// lowrank.h on a CUDA device: the arithmetic of lane.h in the orders of lowrank.h, so it has the bits of the CPU
// variants.
#pragma once

#include <kernels/lowrank/lowrank.h>

// Each enqueues the call of lowrank.h of its name on `stream` (a cudaStream_t). All arrays are memory of the device,
// with the alignment of their types. Each returns a cudaError_t: 0; cudaErrorInvalidValue, without a launch, for null
// and for arguments that the host's call refuses; or the error of the launch. None blocks.
extern "C" int zeroth_cuda_lowrank_product(const zeroth::kernels::LowRankProductArgs* args, void* stream);
extern "C" int zeroth_cuda_lowrank_transposed_product(const zeroth::kernels::LowRankProductArgs* args, void* stream);
extern "C" int zeroth_cuda_lowrank_restore(const zeroth::kernels::LowRankRestoreArgs* args, void* stream);
/// The number of columns that became zeros is not told.
extern "C" int zeroth_cuda_lowrank_orthonormalize(const zeroth::kernels::OrthonormalizeArgs* args, void* stream);
extern "C" int zeroth_cuda_lowrank_draw_missing(const zeroth::kernels::LowRankDrawArgs* args, void* stream);
