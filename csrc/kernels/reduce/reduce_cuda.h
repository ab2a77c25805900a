// sum_sources and extreme_sources on a CUDA device: the arithmetic of reduce_math.h and extreme_math.h, so
// the bits of the CPU variants.
#pragma once

#include <kernels/reduce/extreme.h>
#include <kernels/reduce/reduce.h>

#include <cstdint>

/// Enqueues sum_sources(args) on `stream` (a cudaStream_t). dst and the elements of sources are device
/// pointers; the arrays sources, src_dtypes and groups themselves lie on the host and are not needed after
/// the return. workspace: null, or at least zeroth_cuda_sum_sources_workspace(args) bytes on the device,
/// aligned to 16 (to 8 it is slower), that nobody else uses until the sum is done. Returns a cudaError_t: 0;
/// cudaErrorInvalidValue for what sum_sources refuses and for a workspace that is missing, and nothing is
/// launched; or why a launch failed. Faults of a kernel itself surface at the stream's next synchronisation.
/// Does not block.
extern "C" int zeroth_cuda_sum_sources(const zeroth::kernels::SumSourcesArgs* args, void* workspace, void* stream);

/// Bytes of workspace for zeroth_cuda_sum_sources: 0 up to 128 sources, else two arrays of n elements in the
/// type of the sum.
extern "C" std::int64_t zeroth_cuda_sum_sources_workspace(const zeroth::kernels::SumSourcesArgs* args);

/// The same for extreme_sources. The workspace is that of zeroth_cuda_extreme_sources_workspace: 0 bytes up
/// to 128 sources, else n elements.
extern "C" int zeroth_cuda_extreme_sources(const zeroth::kernels::ExtremeSourcesArgs* args, void* workspace,
                                           void* stream);
extern "C" std::int64_t zeroth_cuda_extreme_sources_workspace(const zeroth::kernels::ExtremeSourcesArgs* args);
