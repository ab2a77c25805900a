// Streams of a CUDA device behind Stream.
#pragma once

#include "device/cuda/cuda_table.h"
#include "device/cuda/event_cache.h"
#include "device/stream_runtime.h"

#include <zeroth/base/deadline.h>

#include <memory>

namespace zeroth::detail {

/// A task runs at once on the thread that enqueues it, with the device current, and gives work to Stream::native().
/// record() and order_after() are events and waits on the device: the host waits in run_until() only, at most `timeout`
/// (kTimeout), in slices that look for interrupts. An error that the device reports is kResource in every later wait.
/// Points of other runtimes are ordered after by their native event, or, where they have none, by waiting on the host.
[[nodiscard]] std::shared_ptr<StreamRuntime> make_cuda_runtime(const CudaTable& cuda, int device, Milliseconds timeout);

/// Whether it has; does not block. Throws for an error of the device.
[[nodiscard]] bool event_happened(const CudaTable& cuda, void* event, std::string_view where);

}  // namespace zeroth::detail
