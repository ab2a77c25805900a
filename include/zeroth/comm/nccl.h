// A seat whose calls on CUDA streams NCCL makes.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/comm/factory.h>

#include <memory>

namespace zeroth {

/// A group of the ranks of `base`, each with a GPU of its own (options.device). Matched over `base`, blocks until NCCL
/// has connected them, at most options.timeout: kTimeout with the ranks that have not come, as far as `base` has
/// windows to see that. Throws kEnvironment where NCCL, CUDA's runtime or a GPU is missing or too old, on every rank
/// with the word of the rank that lacks it; kConfig where two ranks have one GPU; kMismatch where ranks have different
/// versions of NCCL or of CUDA's runtime, different options.reduction or different options.check_calls.
///
/// Calls on a stream of a CUDA device (Stream::native()) go over NCCL, with buffers of that device; all else - calls on
/// streams of the host, windows, waits, abort - is `base`'s. The two are separate channels: each keeps the order of
/// submission, across groups too, and what is on the one does not wait for the other.
///
/// submit() on a CUDA stream never waits for the device or for earlier calls: the calls run on a stream of the seat's
/// own, after what `stream` holds, and `stream` goes on after them. It returns when NCCL has taken the calls, which at
/// a group's first calls may mean that peers must come. The matched calls of one submit() are one NCCL group, so none
/// may touch what another of them writes (kUsage). Work::wait() polls for errors of NCCL, `base`'s view of the peers
/// and the deadline; what it finds ends the seat and NCCL's communicator, in bounded time, so that no kernel spins for
/// ever.
///
/// Other than elsewhere, and refused in one line where it is asked for:
/// - NCCL adds in an order of its own, and rounds bf16 and fp16 as it goes: sums, minima and maxima of floating-point
/// numbers need
///   options.reduction == Reduction::kTransport. Those of integers have the same bits in any order.
/// - in_dtype == out_dtype in reductions, and no Collective::accumulate.
/// What ranks call is compared without a meeting, in waits, where `base` has windows: a mismatch is kMismatch with both
/// sides, at the latest when the wait ends, and data may have moved by then; the parts of an all_to_all, and messages
/// between two ranks, are not compared, and end by the deadline. Bytes are reported when NCCL takes a call, as the
/// formula has them.
///
/// With options.check_calls ranks compare each matched call over a group that is split from `base`, with windows or
/// without, before NCCL hears of it: a mismatch, of the parts of an all_to_all too, is kMismatch with both sides in the
/// Work on every rank, and no rank gives the call to NCCL. split() and attach() are compared with those calls; in
/// errors they read as barriers with that name. The price is that submit() on a CUDA stream then blocks the host,
/// though never for the device: until all ranks of the group are at the same call, at most options.timeout (kTimeout in
/// the Work). So one thread cannot make the calls of two seats, ranks must have their calls on streams of the host and
/// those on CUDA streams in one common order, and the calls of one submit() are an NCCL group each. Messages between
/// two ranks go on as without it.
///
/// attach() of an ArenaKind::kDevice arena registers it with NCCL, where NCCL does that (2.19): its buffers need no
/// copies. The window has the rank's own bytes only. Memory: 4 bytes on the device, a board of what this rank calls in
/// memory of the host, with options.check_calls one more group of `base`, and what NCCL takes.
[[nodiscard]] std::unique_ptr<CommBackend> make_nccl_backend(std::unique_ptr<CommBackend> base,
                                                             const CommOptions& options);

}  // namespace zeroth
