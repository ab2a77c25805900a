#include "doctor/wire.h"

#include "base/hmac.h"
#include "hosts/secret.h"
#include "hosts/sockets.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>

namespace zeroth::doctor {
namespace {

constexpr Milliseconds kStrangerPatience{3000};
constexpr std::size_t kMaxStrangers = 64;
constexpr std::string_view kGreeting = "ZEROTHDR";
constexpr std::size_t kRankBytes = 4;
constexpr std::size_t kVisitBytes = kRankBytes + kNonceBytes + sizeof(Digest);

std::string number_text(std::uint32_t value) {
  std::string text(kRankBytes, '\0');
  for (std::size_t i = 0; i < kRankBytes; ++i) text[i] = static_cast<char>(value >> (8 * i) & 0xFFU);
  return text;
}

std::uint32_t number_of(std::string_view text) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < kRankBytes; ++i) value |= std::uint32_t{static_cast<unsigned char>(text[i])} << (8 * i);
  return value;
}

/// A rank's proof is bound to its number, so that nobody who listens can come as another one.
std::string visit_proof(ProofSide side, const std::string& secret, std::string_view own_nonce,
                        const std::string& visit) {
  return proof_of(side, secret, own_nonce, visit);
}

void wait_for(int fd, short events, const Deadline& deadline, const char* what) {
  while (true) {
    pollfd polled{.fd = fd, .events = events, .revents = 0};
    const int ready = ::poll(&polled, 1, static_cast<int>(deadline.slice().count()));
    if (ready > 0) return;
    ZR_CHECK(
        !deadline.passed(), ErrorCode::kTimeout,
        fmt::format("nothing for {:.0f} s while {}", static_cast<double>(deadline.timeout().count()) / 1000, what));
  }
}

std::string address_of(int fd, bool own) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  std::array<char, NI_MAXHOST> text{};
  if ((own ? ::getsockname(fd, generic, &length) : ::getpeername(fd, generic, &length)) != 0 ||
      ::getnameinfo(generic, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return "";
  }
  constexpr std::string_view kMapped = "::ffff:";
  const std::string numeric = text.data();
  return numeric.starts_with(kMapped) && numeric.find('.') != std::string::npos ? numeric.substr(kMapped.size())
                                                                                : numeric;
}

int port_of(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

/// A host that vanishes says nothing, and who waits for it without a word of its own would wait for as long as the
/// examination may take. Longer than a task.
constexpr int kVanishedAfterS = 12;

void set(int fd, int level, int option, int value) {
  ::setsockopt(fd, level, option, &value, sizeof value);
}

/// What is said is short and awaited, by somebody who may vanish.
void prepare(int fd) {
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, kVanishedAfterS / 3);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, kVanishedAfterS / 3);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, 2);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kVanishedAfterS * 1000);
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string read_text(Wire& wire, std::size_t bytes, const Deadline& deadline) {
  std::string text(bytes, '\0');
  wire.read_all(std::as_writable_bytes(std::span(text.data(), text.size())), deadline);
  return text;
}

}  // namespace

void Wire::write_all(std::span<const std::byte> bytes, const Deadline& deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN) {
      wait_for(fd(), POLLOUT, deadline, "sending");
    } else if (errno != EINTR) {
      throw Error(ErrorCode::kPeerLost, "the connection broke: " + errno_text(errno));
    }
  }
}

std::size_t Wire::read_some(std::span<std::byte> bytes, const Deadline& deadline) {
  while (true) {
    const ssize_t got = ::recv(fd(), bytes.data(), bytes.size(), 0);
    if (got >= 0) return static_cast<std::size_t>(got);
    if (errno == EAGAIN) {
      wait_for(fd(), POLLIN, deadline, "waiting for an answer");
    } else if (errno != EINTR) {
      throw Error(ErrorCode::kPeerLost, "the connection broke: " + errno_text(errno));
    }
  }
}

void Wire::read_all(std::span<std::byte> bytes, const Deadline& deadline) {
  while (!bytes.empty()) {
    const std::size_t got = read_some(bytes, deadline);
    ZR_CHECK(got > 0, ErrorCode::kPeerLost, "the other side has closed the connection");
    bytes = bytes.subspan(got);
  }
}

void Wire::send(std::string_view message, const Deadline& deadline) {
  ZR_ASSERT(message.size() <= kMaxMessageBytes, "a message of the doctor is too large");
  write_all(bytes_of(number_text(static_cast<std::uint32_t>(message.size())) + std::string(message)), deadline);
}

std::string Wire::receive(const Deadline& deadline) {
  const std::uint32_t bytes = number_of(read_text(*this, kRankBytes, deadline));
  ZR_CHECK(bytes <= kMaxMessageBytes, ErrorCode::kLaunch, "a message is too large",
           {.expected = fmt::format("at most {} bytes", kMaxMessageBytes), .got = std::to_string(bytes)});
  return read_text(*this, bytes, deadline);
}

std::pair<Wire, Wire> make_wires() {
  std::array<int, 2> ends{};
  ZR_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) == 0, ErrorCode::kResource,
           "no sockets: " + errno_text(errno), {.where = "zeroth doctor"});
  return {Wire(UniqueFd(ends[0])), Wire(UniqueFd(ends[1]))};
}

Door::Door(const Endpoint& endpoint, std::string secret)
    : secret_(std::move(secret)), socket_(listen_at(endpoint)), port_(port_of(socket_.get())) {}

int Door::look_at(Visitor& visitor) const {
  std::array<std::byte, kVisitBytes> bytes{};
  const ssize_t got = ::recv(visitor.wire.fd(), bytes.data(), kVisitBytes - visitor.heard.size(), 0);
  if (got < 0) return errno == EAGAIN || errno == EINTR ? -1 : -2;
  if (got == 0) return -2;
  visitor.heard.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(got));
  if (visitor.heard.size() < kVisitBytes) return -1;
  const std::string visit = visitor.heard.substr(0, kRankBytes + kNonceBytes);
  const std::uint32_t rank = number_of(visit);
  const bool known =
      same_proof(visitor.heard.substr(visit.size()), visit_proof(ProofSide::kNode, secret_, visitor.nonce, visit));
  return known && rank <= 0x7FFFFFFFU ? static_cast<int>(rank) : -2;
}

Wire Door::admit(const Deadline& deadline, int& rank) {
  rank = -1;
  while (!deadline.passed()) {
    std::vector<pollfd> polled{{.fd = socket_.get(), .events = POLLIN, .revents = 0}};
    for (const Visitor& visitor : visitors_)
      polled.push_back({.fd = visitor.wire.fd(), .events = POLLIN, .revents = 0});
    ::poll(polled.data(), polled.size(), static_cast<int>(deadline.slice().count()));
    for (std::size_t i = 0; i < visitors_.size(); ++i) {
      const bool spoke = polled[i + 1].revents != 0;
      const int who = spoke ? look_at(visitors_[i]) : visitors_[i].until.passed() ? -2 : -1;
      if (who == -1) continue;
      Visitor visitor = std::move(visitors_[i]);
      visitors_.erase(visitors_.begin() + static_cast<std::ptrdiff_t>(i));
      if (who == -2) {
        ++strangers_;
        break;  // `polled` no longer fits the visitors
      }
      try {
        const std::string visit = visitor.heard.substr(0, kRankBytes + kNonceBytes);
        visitor.wire.write_all(bytes_of(visit_proof(ProofSide::kHead, secret_, visitor.nonce, visit)),
                               Deadline(kStrangerPatience));
      } catch (const Error&) {
        break;  // it has gone; it may come again
      }
      rank = who;
      return std::move(visitor.wire);
    }
    std::string address;
    UniqueFd socket = accept_one(socket_.get(), address);
    if (!socket.valid()) continue;
    prepare(socket.get());
    if (visitors_.size() == kMaxStrangers) {
      visitors_.erase(visitors_.begin());  // the oldest makes room
      ++strangers_;
    }
    Visitor visitor{.wire = Wire(std::move(socket)), .until = Deadline(kStrangerPatience), .nonce = random_nonce()};
    try {
      visitor.wire.write_all(bytes_of(std::string(kGreeting) + visitor.nonce), visitor.until);
      visitors_.push_back(std::move(visitor));
    } catch (const Error&) {
      ++strangers_;
    }
  }
  return {};
}

Wire knock(const std::vector<Endpoint>& endpoints, const std::string& secret, int rank, const Deadline& deadline) {
  std::vector<std::string> reasons(endpoints.size());
  while (true) {
    for (std::size_t i = 0; i < endpoints.size(); ++i) {
      UniqueFd socket =
          connect_once(endpoints[i], std::clamp(deadline.remaining(), Milliseconds{1}, Milliseconds{2000}), reasons[i]);
      if (!socket.valid()) continue;
      prepare(socket.get());
      Wire wire(std::move(socket));
      const Deadline patience(std::clamp(deadline.remaining(), Milliseconds{1}, kStrangerPatience));
      try {
        const std::string greeting = read_text(wire, kGreeting.size() + kNonceBytes, patience);
        const std::string nonce = greeting.substr(kGreeting.size());
        const std::string visit = number_text(static_cast<std::uint32_t>(rank)) + random_nonce();
        if (greeting.starts_with(kGreeting)) {
          wire.write_all(bytes_of(visit + visit_proof(ProofSide::kNode, secret, nonce, visit)), patience);
          const std::string proof = read_text(wire, sizeof(Digest), patience);
          if (same_proof(proof, visit_proof(ProofSide::kHead, secret, nonce, visit))) return wire;
        }
        reasons[i] = "somebody else listens there";
      } catch (const Error& error) {
        reasons[i] = error.message();
      }
    }
    if (deadline.passed()) break;
    std::this_thread::sleep_for(std::min(deadline.remaining(), Milliseconds{100}));
  }
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < endpoints.size(); ++i)
    parts.push_back(fmt::format("{}: {}", text_of(endpoints[i]), reasons[i]));
  throw Error(
      ErrorCode::kTimeout,
      fmt::format("nobody of this job answers for {:.0f} s", static_cast<double>(deadline.timeout().count()) / 1000),
      {.got = join(parts, " | "),
       .hint = "a firewall, the wrong interface, or a name that leads to loopback there (/etc/hosts)"});
}

Endpoint any_port_like(const std::string& address) {
  return {.host = address.find(':') != std::string::npos ? "::" : ""};
}

std::string own_address(const Wire& wire) {
  return address_of(wire.fd(), true);
}

std::string peer_address(const Wire& wire) {
  return address_of(wire.fd(), false);
}

}  // namespace zeroth::doctor
