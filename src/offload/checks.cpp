#include "offload/checks.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <fmt/format.h>

#include <array>
#include <string_view>

namespace zeroth::offload {

std::size_t checked_block(int block, std::size_t count) {
  ZR_CHECK(block >= 0 && static_cast<std::size_t>(block) < count, ErrorCode::kUsage, "a store has no such block",
           {.where = "offload", .expected = fmt::format("0 to {}", count - 1), .got = std::to_string(block)});
  return static_cast<std::size_t>(block);
}

std::string block_name(const StateBlocks& blocks, int block) {
  return blocks.name ? blocks.name(block) : "block " + std::to_string(block);
}

std::uint64_t checksum_of(std::span<const std::byte> bytes, int block, std::uint64_t generation) {
  const std::array<std::uint64_t, 3> owner{static_cast<std::uint64_t>(block), generation, bytes.size()};
  const std::string_view seed(reinterpret_cast<const char*>(owner.data()), sizeof owner);
  return digest64({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, digest64(seed));
}

std::string hex(std::uint64_t value) {
  return fmt::format("{:016x}", value);
}

}  // namespace zeroth::offload
