// Placement: the distribution of one state of one unit over the ranks of an axis. ZeRO stages are made of these values.
#pragma once

#include <cstdint>
#include <string_view>

namespace zeroth {

enum class Placement : std::uint8_t {
  kReplicate,  ///< every rank holds all of it
  kPartial,    ///< every rank holds all of it, and the value is the sum over ranks
  kFlat,       ///< rank r holds its range of the flat buffer
};

[[nodiscard]] std::string_view name_of(Placement placement) noexcept;

}  // namespace zeroth
