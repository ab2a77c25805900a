#include "comm/control/control_link.h"

#include <zeroth/base/error.h>
#include <zeroth/base/interrupt.h>
#include <zeroth/base/surroundings.h>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

namespace zeroth::detail {
namespace {

constexpr std::size_t kMostForkClosed = 8'192;
constexpr std::size_t kMostQueued = std::size_t{1} << 20U;
constexpr std::size_t kReadBytes = std::size_t{16} << 10U;
constexpr int kMostReads = 64;  // at once: one that never stops talking must not keep the thread from the others

/// [Note: Closed in children] fork() has no flag as execve() has: a handler closes these. Atomics, because it runs in
/// the child of a process whose threads go on.
std::array<std::atomic<int>, kMostForkClosed>& fork_closed() {
  static std::array<std::atomic<int>, kMostForkClosed> descriptors{};  // one more than the number, 0: free
  return descriptors;
}

void close_in_child() {
  for (auto& descriptor : fork_closed()) {
    const int held = descriptor.exchange(0);
    if (held > 0) ::close(held - 1);
  }
}

int remember(int fd) {
  static std::once_flag once;
  std::call_once(once, [] { (void)::pthread_atfork(nullptr, nullptr, close_in_child); });
  auto& descriptors = fork_closed();
  for (std::size_t place = 0; place < descriptors.size(); ++place) {
    int free = 0;
    if (descriptors[place].compare_exchange_strong(free, fd + 1)) return static_cast<int>(place);
  }
  return -1;  // as many connections as no hub has
}

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
};

SocketAddress parse(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  ZR_CHECK(code == 0 && found != nullptr, ErrorCode::kResource, fmt::format("not an address: {}", ::gai_strerror(code)),
           {.where = "comm.control", .which = host});
  SocketAddress address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  ::freeaddrinfo(found);
  return address;
}

TcpAddress numeric(const sockaddr_storage& address) {
  std::array<char, INET6_ADDRSTRLEN> host{};
  const auto* four = reinterpret_cast<const sockaddr_in*>(&address);
  const auto* six = reinterpret_cast<const sockaddr_in6*>(&address);
  const bool is_six = address.ss_family == AF_INET6;
  const void* bytes = is_six ? static_cast<const void*>(&six->sin6_addr) : &four->sin_addr;
  (void)::inet_ntop(address.ss_family, bytes, host.data(), host.size());
  return {host.data(), ntohs(is_six ? six->sin6_port : four->sin_port)};
}

void tune(int socket) {
  const int one = 1;
  const int dead_ms = 10'000;
  (void)::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  (void)::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
  (void)::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &dead_ms, sizeof dead_ms);
}

}  // namespace

ForkClosedFd::ForkClosedFd(UniqueFd fd) : fd_(fd.release()), place_(fd_ >= 0 ? remember(fd_) : -1) {}
ForkClosedFd::ForkClosedFd(ForkClosedFd&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), place_(std::exchange(other.place_, -1)) {}
ForkClosedFd& ForkClosedFd::operator=(ForkClosedFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
    place_ = std::exchange(other.place_, -1);
  }
  return *this;
}

void ForkClosedFd::reset() noexcept {
  if (fd_ < 0) return;
  // In a forked child the number is closed already, and may be somebody else's by now.
  const bool ours = place_ < 0 || fork_closed()[static_cast<std::size_t>(place_)].exchange(0) == fd_ + 1;
  if (ours) ::close(fd_);
  fd_ = place_ = -1;
}

std::string to_text(const TcpAddress& address) {
  const bool six = address.host.find(':') != std::string::npos;
  return six ? fmt::format("[{}]:{}", address.host, address.port) : fmt::format("{}:{}", address.host, address.port);
}

ForkClosedFd listen_tcp(const std::string& host, TcpAddress& bound) {
  SocketAddress address = parse(host, 0);
  UniqueFd socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const auto require = [&](bool good, std::string_view call) {
    ZR_CHECK(good, ErrorCode::kResource, fmt::format("{} failed: {}", call, errno_text(errno)),
             {.where = "comm.control", .which = host, .hint = "name another interface with ZEROTH_INTERFACE"});
  };
  require(static_cast<bool>(socket), "socket");
  if (address.storage.ss_family == AF_INET6) {
    const int one = 1;
    (void)::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
  }
  require(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length) == 0, "bind");
  require(::listen(socket.get(), SOMAXCONN) == 0, "listen");
  require(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address.storage), &address.length) == 0,
          "getsockname");
  bound = {host, numeric(address.storage).port};
  return ForkClosedFd(std::move(socket));
}

ForkClosedFd connect_tcp(const TcpAddress& to, const Deadline& deadline, std::string& why) {
  const SocketAddress address = parse(to.host, to.port);
  UniqueFd socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    why = errno_text(errno);
    return {};
  }
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length) != 0 &&
      errno != EINPROGRESS) {
    why = errno_text(errno);
    return {};
  }
  pollfd watched{.fd = socket.get(), .events = POLLOUT, .revents = 0};
  while (::poll(&watched, 1, static_cast<int>(deadline.slice().count())) <= 0) {
    check_interrupt();
    if (!deadline.passed()) continue;
    why = "no answer";
    return {};
  }
  int error = 0;
  socklen_t length = sizeof error;
  (void)::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) {
    why = errno_text(error);
    return {};
  }
  tune(socket.get());
  return ForkClosedFd(std::move(socket));
}

ForkClosedFd accept_tcp(const ForkClosedFd& listener, TcpAddress& peer) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  UniqueFd socket(
      ::accept4(listener.get(), reinterpret_cast<sockaddr*>(&address), &length, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket) peer = numeric(address);
  return ForkClosedFd(std::move(socket));
}

std::vector<std::string> interface_addresses(const std::string& interface) {
  const std::vector<Interface> all = interfaces();
  ZR_CHECK(!all.empty(), ErrorCode::kResource, "the interfaces of this host cannot be listed: " + errno_text(errno),
           {.where = "comm.control"});
  std::vector<std::string> found;
  std::vector<std::string> names;
  for (const Interface& one : all) {
    if (names.empty() || names.back() != one.name) names.push_back(one.name);
    if (interface.empty() ? one.loopback : interface != one.name) continue;
    if (one.address.starts_with("fe80:")) continue;  // means nothing without the other host's own name of the interface
    found.push_back(one.address);
  }
  ZR_CHECK(!found.empty() || interface.empty(), ErrorCode::kEnvironment, "no such interface with an address is up",
           {.where = "comm.control",
            .which = "ZEROTH_INTERFACE",
            .expected = fmt::format("one of {}", fmt::join(names, ", ")),
            .got = interface});
  return found;
}

std::vector<std::string> own_addresses_of(const std::string& name, const std::vector<std::string>& own) {
  std::vector<std::string> found = addresses_of(name);
  std::erase_if(found, [&own](const std::string& address) { return std::ranges::find(own, address) == own.end(); });
  return found;
}

ControlLink::ControlLink(ForkClosedFd socket) : socket_(std::move(socket)) {
  tune(socket_.get());
}

void ControlLink::send(const ControlMessage& message) {
  if (broken_) return;
  const std::vector<std::byte> frame = encode(message);
  if (out_.size() + frame.size() > kMostQueued) {
    trouble_ = "it does not read what it is sent";
    broken_ = true;
    return;
  }
  out_.insert(out_.end(), frame.begin(), frame.end());
  flush();
}

void ControlLink::flush() {
  while (!out_.empty() && !broken_) {
    const ssize_t sent = ::send(socket_.get(), out_.data(), out_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      out_.erase(out_.begin(), out_.begin() + sent);
    } else if (sent < 0 && errno == EINTR) {
      continue;
    } else if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return;
    } else {
      trouble_ = errno_text(errno);
      broken_ = true;
    }
  }
}

bool ControlLink::receive(const std::function<void(ControlMessage)>& take) {
  bool open = true;
  for (int reads = 0; open && reads < kMostReads; ++reads) {
    const std::size_t before = in_.size();
    in_.resize(before + kReadBytes);
    const ssize_t got = ::recv(socket_.get(), in_.data() + before, kReadBytes, MSG_DONTWAIT);
    in_.resize(before + static_cast<std::size_t>(got > 0 ? got : 0));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (got <= 0) {
      if (!broken_) trouble_ = got == 0 ? "it has closed the connection" : errno_text(errno);
      open = false;
    }
    // What has come before the end still counts, also where a write has found the end first.
    std::size_t used = 0;
    for (;;) {
      Decoded decoded = decode(std::span(in_).subspan(used), largest_);
      if (decoded.outcome == Decoded::Outcome::kIncomplete) break;
      if (decoded.outcome == Decoded::Outcome::kRefused) {
        trouble_ = decoded.why;
        return false;
      }
      used += decoded.consumed;
      take(*std::move(decoded.message));
    }
    in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(used));
    if (static_cast<std::size_t>(got > 0 ? got : 0) < kReadBytes) break;
  }
  return open && !broken_;
}

}  // namespace zeroth::detail
