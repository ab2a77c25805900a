// Messages of the store over a unix socket, as bytes: what a client asks, what the server answers. Knows no socket.
#pragma once

#include "comm/store/store_table.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace zeroth::detail {

enum class StoreRequestKind : char { kSet, kFind, kAdd };
enum class StoreStatus : char { kOk, kMissing, kError };

/// Views into the bytes that were parsed.
struct StoreRequest {
  std::uint64_t number = 0;  ///< counted by the client
  StoreRequestKind kind = StoreRequestKind::kSet;
  std::string_view key{};
  std::string_view value{};  ///< kAdd: the 8 bytes of a number
};
struct StoreAnswer {
  std::uint64_t number = 0;  ///< of the request
  StoreStatus status = StoreStatus::kOk;
  std::string_view value{};
};

inline constexpr std::size_t kMaxStoreMessageBytes = kMaxEntryBytes + 64;
inline constexpr std::size_t kStoreAnswerHeadBytes = 16;

[[nodiscard]] std::string bytes_of_request(const StoreRequest& request);
[[nodiscard]] std::string bytes_of_answer(const StoreAnswer& answer);
/// Nothing for what is no request: too short, a key longer than the message, a kind that there is not.
[[nodiscard]] std::optional<StoreRequest> parse_request(std::span<const std::byte> bytes);
/// Nothing for what is too short, or of a status that there is not.
[[nodiscard]] std::optional<StoreAnswer> parse_answer(std::span<const std::byte> bytes);

/// What a server answers. Never throws zeroth::Error: what the table refuses is the answer.
[[nodiscard]] std::string perform(StoreTable& table, const StoreRequest& request);

}  // namespace zeroth::detail
