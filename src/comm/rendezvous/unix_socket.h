// Abstract unix sockets with whole messages, passed descriptors and deadlines. Nothing in the file system:
// nothing is left.
#pragma once

#include "base/unique_fd.h"
#include "comm/function_ref.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::detail {

/// Who is at the other end, by the kernel's word.
struct PeerIdentity {
  pid_t pid = 0;
  uid_t uid = 0;
};
[[nodiscard]] PeerIdentity identity_of(int socket);

/// "zeroth-<purpose>-<uid>-<digest of job>".
[[nodiscard]] std::string socket_name(std::string_view purpose, std::string_view job);

/// SOCK_SEQPACKET under an abstract name. Empty if the name is taken; throws kResource for everything else.
[[nodiscard]] std::optional<UniqueFd> listen_at(const std::string& name);
/// Tries until somebody of this user listens; check() is called at least every 100 ms and throws when that is
/// pointless.
[[nodiscard]] UniqueFd connect_to(const std::string& name, FunctionRef<void()> check);
/// A new connection, or empty if none is waiting.
[[nodiscard]] UniqueFd accept_from(int listener);

/// Sends one message with descriptors. False if the other side has closed. Waits while the other side does
/// not read; check() is called at least every 100 ms then, and throws when that is pointless.
[[nodiscard]] bool send_message(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors,
                                FunctionRef<void()> check);
/// For a message on a connection that holds nothing unread, where there is nothing to wait for: throws
/// kTimeout if the other side does not take it all the same within kSendPatience.
[[nodiscard]] bool send_message(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors = {});
inline constexpr Milliseconds kSendPatience{2'000};

struct Message {
  std::vector<std::byte> bytes{};
  std::vector<UniqueFd> descriptors{};
};
/// Waits for one message of at most `limit` bytes; empty if the other side has closed. check() as above.
[[nodiscard]] std::optional<Message> receive_message(int socket, std::size_t limit, FunctionRef<void()> check);

/// A struct as the bytes of a message.
template <class T>
[[nodiscard]] std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span<const T, 1>(&value, 1));
}

}  // namespace zeroth::detail
