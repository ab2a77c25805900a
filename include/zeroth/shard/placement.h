// Placement: how one state of one unit lies on the ranks of an axis. ZeRO stages are values made of these.
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

/// What has to move to get from one placement to another: the only "ZeRO algorithm".
enum class Transition : std::uint8_t {
  kNone,
  kAllGather,      ///< Flat -> Replicate
  kReduceScatter,  ///< Partial -> Flat
  kAllReduce,      ///< Partial -> Replicate: reduce-scatter, then all-gather of the same shards
  kLocalSlice,     ///< Replicate -> Flat
};

/// Throws kUsage for transitions that have no meaning (anything -> Partial).
[[nodiscard]] Transition transition(Placement from, Placement to);

}  // namespace zeroth
