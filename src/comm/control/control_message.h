// What ranks tell each other beside the data: a closed set of bounded messages with a fixed layout, little endian.
#pragma once

#include "base/hmac.h"

#include <zeroth/base/error.h>
#include <zeroth/comm/rank_activity.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace zeroth::detail {

using Nonce = std::array<std::uint8_t, 16>;

/// The hub's first message: bytes that it has drawn for this connection.
struct ChallengeMessage {
  Nonce nonce{};
  bool operator==(const ChallengeMessage&) const = default;
};
/// The rank's answer: who it is, and the proof of it (control/introduction.h).
struct HelloMessage {
  Nonce nonce{};
  Digest proof{};
  std::uint32_t rank = 0;
  std::uint32_t size = 0;
  std::uint32_t pid = 0;
  std::string host{};
  std::uint64_t host_digest = 0;  ///< of host_identity(): where it is the same, so are process ids
  bool operator==(const HelloMessage&) const = default;
};
/// The hub's answer to that: its own proof. From here on both say what they like.
struct WelcomeMessage {
  Digest proof{};
  bool operator==(const WelcomeMessage&) const = default;
};
/// A sign of life, with RankActivity::running_action(): so the last action of who dies is known.
struct PingMessage {
  ActionWord action = 0;
  std::int64_t steps = 0;
  bool operator==(const PingMessage&) const = default;
};
/// Hub to rank: what are you doing?
struct AskMessage {
  std::uint32_t question = 0;
  bool with_place = false;
  bool operator==(const AskMessage&) const = default;
};
/// Rank to hub; question 0: of its own accord.
struct StatusMessage {
  std::uint32_t question = 0;
  RankStatus status{};
};
/// Either way: the job ends with this error. From a rank to the hub, from there to all.
struct VerdictMessage {
  ErrorCode code = ErrorCode::kAborted;
  std::string message{};
  ErrorContext context{};
  bool of_job = false;  ///< an ErrorOfJob
};
/// Either way: who says it leaves in order, and this is what it has done.
struct ByeMessage {
  RankStatus status{};
};
using ControlMessage = std::variant<ChallengeMessage, HelloMessage, WelcomeMessage, PingMessage, AskMessage,
                                    StatusMessage, VerdictMessage, ByeMessage>;

/// A frame: 2 bytes of version, 2 of magic, 4 of length, 1 of kind, then the fields.
inline constexpr std::uint16_t kControlVersion = 4;  ///< changes with every change of the messages
inline constexpr std::size_t kFrameHeaderBytes = 9;
inline constexpr std::size_t kLargestFrameBytes = std::size_t{64} << 10U;
inline constexpr std::size_t kLargestStrangersFrameBytes =
    512;  ///< of somebody who has not shown that he has the secret
inline constexpr std::size_t kLongestText =
    4'096;  ///< longer ones are cut when they are written, refused when they are read
inline constexpr std::size_t kMostWaitedRanks = 4'096;
inline constexpr std::size_t kMostGroups = 32;     ///< in RankStatus::calls_begun; others are left out
inline constexpr std::size_t kLongestGroup = 256;  ///< those of longer names, too

[[nodiscard]] std::vector<std::byte> encode(const ControlMessage& message);

/// What lies at the beginning of `bytes`.
struct Decoded {
  enum class Outcome : std::uint8_t { kMessage, kIncomplete, kRefused };
  Outcome outcome = Outcome::kIncomplete;
  std::size_t consumed = 0;  ///< bytes of a whole message
  std::optional<ControlMessage> message{};
  std::string why{};  ///< refused: what is wrong
};
/// Never reads past `bytes`, never allocates more than they hold. `largest`: of a frame, without its header.
[[nodiscard]] Decoded decode(std::span<const std::byte> bytes, std::size_t largest = kLargestFrameBytes);

}  // namespace zeroth::detail
