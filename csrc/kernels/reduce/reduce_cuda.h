// sum_sources and extreme_sources on a CUDA device: the arithmetic of reduce_math.h and extreme_math.h, so they have
// the bits of the CPU variants.
#pragma once

#include <kernels/reduce/extreme.h>
#include <kernels/reduce/reduce.h>

#include <cstdint>

/// Enqueues sum_sources(args) on `stream` (a cudaStream_t). dst and the elements of sources are device pointers. The
/// arrays sources, src_dtypes and groups themselves are host memory and are not needed after the return. workspace:
/// null, or at least zeroth_cuda_sum_sources_workspace(args) bytes on the device, aligned to 16 bytes (8 is slower),
/// not used by other work until the sum is done. Returns a cudaError_t: 0; cudaErrorInvalidValue, without a launch, for
/// arguments that sum_sources refuses and for a missing workspace; or the error of a launch. Faults of a kernel itself
/// surface at the stream's next synchronisation. Does not block.
extern "C" int zeroth_cuda_sum_sources(const zeroth::kernels::SumSourcesArgs* args, void* workspace, void* stream);

/// Bytes of workspace for zeroth_cuda_sum_sources: 0 up to 128 sources, else two arrays of n elements of the sum's
/// type.
extern "C" std::int64_t zeroth_cuda_sum_sources_workspace(const zeroth::kernels::SumSourcesArgs* args);

/// The same for extreme_sources. The workspace has zeroth_cuda_extreme_sources_workspace bytes: 0 up to 128 sources,
/// else n elements.
extern "C" int zeroth_cuda_extreme_sources(const zeroth::kernels::ExtremeSourcesArgs* args, void* workspace,
                                           void* stream);
extern "C" std::int64_t zeroth_cuda_extreme_sources_workspace(const zeroth::kernels::ExtremeSourcesArgs* args);
