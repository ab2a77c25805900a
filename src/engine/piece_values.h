// Values of a StatePiece, as they lie in a file, and back.
#pragma once

#include "engine/state_pieces.h"

#include <zeroth/compute/kernels.h>
#include <zeroth/device/stream.h>

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace zeroth {

/// Calls write(bytes) for parts of at most a MiB that make up `piece.writes`, in order. Blocks.
void each_written_part(const StatePiece& piece, Kernels& kernels, const Stream& stream,
                       const std::function<void(std::span<const std::byte>)>& write);

/// Puts values of `piece.has` that came from a file where they belong.
void store(const StatePiece& piece, std::span<const std::byte> values, Kernels& kernels, const Stream& stream);

}  // namespace zeroth
