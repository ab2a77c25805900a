// What stores do with transfers that they have started.
#pragma once

#include <zeroth/device/stream.h>
#include <zeroth/io/scratch_file.h>
#include <zeroth/io/transfer_clock.h>

#include <cstdint>
#include <string>

namespace zeroth::offload {

/// Blocks until the transfer has ended, and adds the time to `wait_ns`, and to the clock as a wait for `what`. Throws
/// as Work::wait().
void wait_for(const Work& transfer, std::uint64_t& wait_ns, TransferClock& clock, const std::string& what);
/// True if no byte moves any more, also after an error. Not what a throwing wait says: after a timeout, and where the
/// queue's watch has ended the wait, the transfer goes on.
[[nodiscard]] bool has_ended(const Work& transfer);
/// Before the memory of a transfer goes: waits for its end, whatever the queue's watch throws, for 60 s at most. Its
/// error is nobody's.
void wait_at_end(const Work& transfer) noexcept;
/// What the file system says that the file takes on disk (st_blocks). `where`: for the error. Throws kIo.
[[nodiscard]] std::uint64_t bytes_on_disk(const ScratchFile& file, const char* where);

}  // namespace zeroth::offload
