// A backend that makes its calls on CUDA streams with NCCL.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/comm/factory.h>

#include <memory>

namespace zeroth {

/// A group of the ranks of `base`, each with its own GPU (options.device). Owns `base`. Collective over `base`; blocks
/// until NCCL has connected the ranks, at most options.timeout. Throws
///   kTimeout      with the ranks that have not come, if `base` has windows to see that
///   kEnvironment  if NCCL, CUDA's runtime or a GPU is missing or too old: on every rank, with the text of that rank
///   kConfig       if two ranks have one GPU
///   kMismatch     if ranks have different versions of NCCL or of CUDA's runtime, different options.reduction or
///   different
///                 options.check_calls
///
/// Calls on a stream of a CUDA device (Stream::native()) go over NCCL, with buffers of that device. `base` handles
/// everything else: calls on host streams, windows, waits, abort. The two are separate channels. Each keeps the order
/// of submission, also across groups, and calls of one channel do not wait for the other.
///
/// submit() on a CUDA stream never waits for the device or for earlier calls. The calls run on a stream of their own,
/// after the earlier work of `stream`; later work of `stream` runs after them. submit() returns when NCCL has taken the
/// calls; for the first calls of a group this may need the other ranks. The collectives of one submit() are one NCCL
/// group, so no call may use memory that another of them writes (kUsage). Work::wait() polls errors of NCCL, `base`'s
/// view of the other ranks, and the deadline. An error ends the group and NCCL's communicator in bounded time, so no
/// kernel spins for ever.
///
/// Differences from other backends, each refused with one line:
/// - NCCL adds in its own order and rounds bf16 and fp16 at each addition. So sums, minima and maxima of floating-point
///   numbers need options.reduction == Reduction::kTransport. Reductions of integers have the same bits in any order.
/// - Reductions need in_dtype == out_dtype, and Collective::accumulate is not supported.
/// If `base` has windows, waiting ranks compare their calls without extra messages. A mismatch is kMismatch with both
/// sides, at the latest when the wait ends; data may have moved by then. Parts of an all_to_all, and messages between
/// two ranks, are not compared and end at the deadline. Bytes are reported when NCCL takes a call, as the formula gives
/// them.
///
/// With options.check_calls ranks compare each collective before NCCL gets it, over a group split from `base`, with
/// or without windows. A mismatch, also of parts of an all_to_all, is kMismatch with both sides in the Work on every
/// rank, and no rank passes the call to NCCL. split() and attach() are compared too; in errors they appear as barriers
/// with that name. The cost: submit() on a CUDA stream blocks the host until all ranks of the group are at the same
/// call, at most options.timeout (kTimeout in the Work); it never waits for the device. So one thread cannot make the
/// calls of two groups, ranks must make their calls on host streams and on CUDA streams in one common order, and each
/// call of one submit() is its own NCCL group. Messages between two ranks work as without check_calls.
///
/// attach() of an ArenaKind::kDevice arena registers it with NCCL, if NCCL supports that (2.19): its buffers need no
/// copies. The window has the rank's own bytes only. Memory: 4 bytes on the device, a board of this rank's calls in
/// host memory, one more group of `base` with options.check_calls, and NCCL's own memory.
[[nodiscard]] std::unique_ptr<CommBackend> make_nccl_backend(std::unique_ptr<CommBackend> base,
                                                             const CommOptions& options);

}  // namespace zeroth
