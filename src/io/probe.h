// Whether a queue does what it says.
#pragma once

#include <zeroth/io/io_queue.h>

#include <memory>

namespace zeroth::detail {

/// Writes 8 blocks at the begin of `file`, reads them back and compares. Throws kIo with the first wrong byte, and what
/// the queue throws.
void probe_queue(IoQueue& queue, const std::shared_ptr<const ScratchFile>& file);

}  // namespace zeroth::detail
