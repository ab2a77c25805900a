// What stores check, and how they name blocks.
#pragma once

#include <zeroth/offload/state_store.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace zeroth::offload {

/// The index of a block; throws kUsage for one that is not there.
[[nodiscard]] std::size_t checked_block(int block, std::size_t count);
/// As the caller names it, or "block 7".
[[nodiscard]] std::string block_name(const StateBlocks& blocks, int block);
/// Of bytes, their number, whose they are, and how often the block was written. xxHash3, 64 bits.
[[nodiscard]] std::uint64_t checksum_of(std::span<const std::byte> bytes, int block, std::uint64_t generation);
[[nodiscard]] std::string hex(std::uint64_t value);

}  // namespace zeroth::offload
