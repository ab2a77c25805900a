#include "comm/rendezvous/rendezvous_messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace zeroth::detail {
namespace {

template <class T>
std::optional<T> parse_message(std::span<const std::byte> bytes) {
  if (bytes.size() != sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(static_cast<void*>(&value), bytes.data(), sizeof value);
  if (value.magic != kRendezvousMagic) return std::nullopt;
  return value;
}

}  // namespace

std::optional<Hello> parse_hello(std::span<const std::byte> bytes) {
  return parse_message<Hello>(bytes);
}
std::optional<Welcome> parse_welcome(std::span<const std::byte> bytes) {
  return parse_message<Welcome>(bytes);
}

std::optional<Error> refusal_in(const Welcome& answer, ErrorContext context) {
  if (answer.code < 0) return std::nullopt;
  const std::string text(answer.text.data(), ::strnlen(answer.text.data(), answer.text.size()));
  return Error(static_cast<ErrorCode>(std::min(answer.code, static_cast<std::int32_t>(ErrorCode::kInternal))), text,
               std::move(context));
}

std::string problem_of(const Hello& hello, const Guest& guest) {
  if (hello.protocol != kRendezvousProtocol) {
    return fmt::format("pid {} speaks protocol {}, rank 0 speaks {}: all ranks must run the same build of Zeroth",
                       guest.pid, hello.protocol, kRendezvousProtocol);
  }
  if (hello.size != guest.size) {
    return fmt::format("rank {} (pid {}) says that there are {} ranks, rank 0 (pid {}) says {}", hello.rank, guest.pid,
                       hello.size, guest.host_pid, guest.size);
  }
  if (guest.pid <= 0) {
    return fmt::format("rank {} is in another process namespace than rank 0: they cannot watch each other", hello.rank);
  }
  if (hello.rank < 1 || hello.rank >= guest.size) {
    return fmt::format("pid {} calls itself rank {} of {}", guest.pid, hello.rank, guest.size);
  }
  return "";
}

}  // namespace zeroth::detail
