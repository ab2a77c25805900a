// memcpy for gathers, whose target's old content is of no use: whole lines are written without being read first, into
// the caches as long as these may hold them, and past them beyond. On a CUDA device this op needs no kernel: it is
// cudaMemcpyAsync.
#pragma once

#include <kernels/common/dispatch.h>

#include <cstdint>

namespace zeroth::kernels {

/// Copies of at least so many bytes use `rep movsb` where the processor says that it is fast (ERMS), else streaming
/// stores.
inline constexpr std::int64_t kCopyLinesBytes = std::int64_t{256} << 10;
/// Copies of at least so many use streaming stores. Both were chosen with benchmarks/kernels/memory_bench, where
/// nothing is in the caches, and benchmarks/comm/comm_peers.py, where all is that may be.
inline constexpr std::int64_t kCopyStreamBytes = std::int64_t{3} << 20;

/// Copies `bytes` bytes between ranges that do not overlap; any alignment; on the calling thread. The
/// streaming stores are fenced before the return: a flag that is published afterwards is seen after the data.
/// kScalar is memcpy. Throws Error{kUsage}: bytes < 0, unsupported isa.
void copy_stream(void* dst, const void* src, std::int64_t bytes, Isa isa);

}  // namespace zeroth::kernels
