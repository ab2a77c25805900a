// Messages of the rendezvous, as bytes, and what rank 0 has to say to a hello. Knows no socket.
#pragma once

#include "comm/rendezvous/rendezvous.h"

#include <zeroth/base/error.h>

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace zeroth::detail {

inline constexpr std::uint64_t kRendezvousMagic = 0x5a65726f74682031U;
inline constexpr std::uint32_t kRendezvousProtocol =
    4;  ///< changes with every change of control_block.h, CallDescriptor or the messages

struct Hello {
  std::uint64_t magic = kRendezvousMagic;
  std::uint32_t protocol = kRendezvousProtocol;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  Refusal refused{};
};
static_assert(sizeof(Hello) == 24, "another version must still be able to read which version this is");

struct Welcome {
  std::uint64_t magic = kRendezvousMagic;
  std::int32_t code = -1;  ///< -1: welcome; else the ErrorCode of the refusal
  std::int32_t unused = 0;
  std::array<std::int32_t, kMaxShmRanks> pids{};
  std::array<char, 512> text{};
};

/// Nothing for what is of another length or begins otherwise: a stranger.
[[nodiscard]] std::optional<Hello> parse_hello(std::span<const std::byte> bytes);
[[nodiscard]] std::optional<Welcome> parse_welcome(std::span<const std::byte> bytes);

/// The refusal in an answer; none for a welcome.
[[nodiscard]] std::optional<Error> refusal_in(const Welcome& answer, ErrorContext context);

/// Who has sent a hello, and what rank 0 of `size` knows.
struct Guest {
  pid_t pid = 0;       ///< by the kernel's word
  pid_t host_pid = 0;  ///< of rank 0
  int size = 0;
};
/// Why rank 0 cannot take it; "" if it can, but for a rank that came before. The rank is then one of 1 to size - 1.
[[nodiscard]] std::string problem_of(const Hello& hello, const Guest& guest);

}  // namespace zeroth::detail
