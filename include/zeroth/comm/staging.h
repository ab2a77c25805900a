// Calls with GPU memory over host transports.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/comm/factory.h>

#include <memory>

namespace zeroth {

/// A group of `base`'s ranks that also takes calls on streams of a CUDA device (Stream::native()), with buffers of that
/// device. The device is options.device, else the current device of the thread that makes the first such call. Ranks
/// may share one GPU. Owns `base`. make_backend() wraps every backend with a host transport in this one. Before the
/// first such call it costs nothing, and CUDA is not loaded.
///
/// Such a call is copied through pinned memory, and `base` makes it on the host. So it has `base`'s bits, checks,
/// counts and errors, and sums in rank order. It runs after the earlier work of its stream and after all calls
/// submitted before; later work of the stream runs after it. Unlike over NCCL, submit() blocks until `base` has made
/// the calls: at most options.timeout for the stream's earlier work (kTimeout), plus `base`'s own time. The Work
/// carries the errors. An error of CUDA is kResource and ends the job for the other ranks.
///
/// Refused (kUsage): a buffer of the host or of another device on a CUDA stream; once CUDA is in use, a device buffer
/// on a host stream; attach() of an ArenaKind::kDevice arena, which other ranks cannot read. Pinned memory: as large as
/// send and recv of the largest call so far, or the largest submit() of sends and receives, and in addition as large as
/// the messages of start() that have been unfinished at one time; counted in options.ledger as kControl. start() blocks
/// until the copies of its sends are on the host, at most options.timeout.
[[nodiscard]] std::unique_ptr<CommBackend> make_staging_backend(std::unique_ptr<CommBackend> base,
                                                                const CommOptions& options);

}  // namespace zeroth
