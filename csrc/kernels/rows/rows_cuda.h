// Rows of a table, gathered by a CUDA device.
#pragma once

#include <kernels/rows/rows.h>

/// Enqueues the gather on `stream` (a cudaStream_t). The table is memory of the device, or page-locked memory of the
/// host, which stays as it is until the stream has come to the gather; indices and out are memory of the device.
/// Returns a cudaError_t: 0; cudaErrorInvalidValue, without a launch, for null and for a negative size or dim < 1; or
/// the error of the launch. Does not block.
extern "C" int zeroth_cuda_gather_rows(const zeroth::kernels::GatherRowsArgs* args, void* stream);
