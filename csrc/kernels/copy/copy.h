// memcpy for gathers: past the caches from a size on, since a gathered slot is larger than them and its old
// content is of no use. On a CUDA device this op needs no kernel: it is cudaMemcpyAsync.
#pragma once

#include <kernels/common/dispatch.h>

#include <cstdint>

namespace zeroth::kernels {

/// Copies of at least this many bytes use streaming stores (chosen with benchmarks/kernels/memory_bench).
inline constexpr std::int64_t kCopyStreamBytes = std::int64_t{256} << 10;

/// Copies `bytes` bytes between ranges that do not overlap; any alignment; on the calling thread. The
/// streaming stores are fenced before the return: a flag that is published afterwards is seen after the data.
/// kScalar is memcpy. Throws Error{kUsage}: bytes < 0, unsupported isa.
void copy_stream(void* dst, const void* src, std::int64_t bytes, Isa isa);

}  // namespace zeroth::kernels
