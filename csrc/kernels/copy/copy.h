// memcpy for gathers, which do not need the target's old content: whole cache lines are written without a read. Ranges
// that fit in the caches are written there, larger ones past the caches. On a CUDA device this is cudaMemcpyAsync.
#pragma once

#include <kernels/common/dispatch.h>

#include <cstdint>

namespace zeroth::kernels {

/// Copies of at least this many bytes use `rep movsb` if the processor reports it as fast (ERMS), else streaming
/// stores.
inline constexpr std::int64_t kCopyLinesBytes = std::int64_t{256} << 10;
/// Copies of at least this many bytes use streaming stores. Both bounds were chosen with
/// benchmarks/kernels/memory_bench (cold caches) and benchmarks/comm/comm_peers.py (warm caches).
inline constexpr std::int64_t kCopyStreamBytes = std::int64_t{3} << 20;

/// Copies `bytes` bytes between ranges that do not overlap, with any alignment, on the calling thread. Streaming stores
/// are fenced before the return, so a flag that is published afterwards becomes visible after the data. kScalar is
/// memcpy. Throws Error{kUsage} for bytes < 0 or an unsupported isa.
void copy_stream(void* dst, const void* src, std::int64_t bytes, Isa isa);

}  // namespace zeroth::kernels
