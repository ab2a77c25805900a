// topk.h on a CUDA device: the arithmetic of lane.h and counts of integers, so it has the bits of the CPU variants.
#pragma once

#include <kernels/topk/topk.h>

#include <cstdint>

// Each enqueues on `stream` (a cudaStream_t). All arrays are memory of the device, with the alignment of their types;
// the list of sources is memory of the host, which is read before the return. Each returns a cudaError_t: 0;
// cudaErrorInvalidValue, without a launch, for null and for arguments that the host's call refuses; or the error of the
// launch. None blocks.

/// Bytes of zeroth_cuda_topk()'s workspace for n elements.
extern "C" std::int64_t zeroth_cuda_topk_workspace(std::int64_t n);
/// topk(); `room` is not used. The workspace is aligned to 8 bytes, and in use until the stream has come to the result.
extern "C" int zeroth_cuda_topk(const zeroth::kernels::TopkArgs* args, void* workspace, void* stream);
/// Adds the number of places outside of [0, n) to *outside, memory that the device reaches.
extern "C" int zeroth_cuda_topk_outside(const zeroth::kernels::TopkAddArgs* args, std::int64_t* outside, void* stream);
/// topk_add(), of sources whose places are all inside, and distinct within a source.
extern "C" int zeroth_cuda_topk_add(const zeroth::kernels::TopkAddArgs* args, void* stream);
