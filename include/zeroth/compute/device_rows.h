// Rows of a table in page-locked memory of the host, read by the device that needs them.
#pragma once

#include <kernels/rows/rows.h>

namespace zeroth {

/// Enqueues the gather on `stream` (a cudaStream_t of the thread's device). The table stays as it is until the stream
/// has come to it. Indices must be good: another one gives a row of NaN. Does not block. Throws kEnvironment without
/// CUDA's runtime or the module zeroth_cuda (see make_kernels()), kUsage for sizes that cannot be, kResource.
void gather_rows_on_device(const kernels::GatherRowsArgs& args, void* stream);

}  // namespace zeroth
