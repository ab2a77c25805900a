// Calls with memory of a GPU over transports of the host.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/comm/factory.h>

#include <memory>

namespace zeroth {

/// A seat of `base`'s ranks that also takes calls on streams of a CUDA device (Stream::native()), with buffers of that
/// device: options.device, else the one that is current on the thread that makes the first such call. Ranks may share
/// one GPU. make_backend() gives every seat whose transport is the host's this ability; until the first such call it
/// costs nothing, and CUDA is not looked for.
///
/// Such a call is copied through pinned memory and made by `base` on the host, so it has `base`'s bits, checks, counts
/// and errors, and sums in rank order as on the host. It comes after what its stream holds, and after all calls that
/// were submitted before; the stream goes on behind it. Unlike over NCCL, submit() blocks until `base` has made the
/// calls, at most options.timeout for what the stream holds (kTimeout) and `base`'s own time. Errors are in the Work,
/// as elsewhere; one of CUDA's is kResource, and ends the job for the other ranks.
///
/// Refused (kUsage): a buffer of the host or of another device on a CUDA stream, and, once CUDA is in use, one of a
/// device on a stream of the host. attach() of an ArenaKind::kDevice arena: peers cannot read it. Pinned memory: as
/// large as the largest call so far, its send and its recv, and of sends and receives the largest submit(); counted in
/// options.ledger as kControl.
[[nodiscard]] std::unique_ptr<CommBackend> make_staging_backend(std::unique_ptr<CommBackend> base,
                                                                const CommOptions& options);

}  // namespace zeroth
