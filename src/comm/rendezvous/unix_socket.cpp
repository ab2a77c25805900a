#include "comm/rendezvous/unix_socket.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/interrupt.h>
#include <zeroth/base/text.h>

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

namespace zeroth::detail {
namespace {

constexpr std::size_t kMaxDescriptors = 253;  // SCM_MAX_FD of Linux

struct Address {
  sockaddr_un address{};
  socklen_t length = 0;
};

Address abstract_address(const std::string& name) {
  Address result;
  result.address.sun_family = AF_UNIX;
  ZR_ASSERT(name.size() + 1 < sizeof result.address.sun_path, "socket names are digests and therefore short");
  std::memcpy(result.address.sun_path + 1, name.data(), name.size());  // byte 0 stays 0: the abstract name space
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

/// No call on it blocks: what has to be waited for is waited for in poll() or in a loop, with a deadline.
UniqueFd make_socket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  ZR_CHECK(socket, ErrorCode::kResource, "socket failed: " + errno_text(errno), {.where = "comm.unix_socket"});
  return socket;
}

}  // namespace

PeerIdentity identity_of(int socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  ZR_CHECK(::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0, ErrorCode::kResource,
           "SO_PEERCRED failed: " + errno_text(errno), {.where = "comm.unix_socket"});
  return {.pid = credentials.pid, .uid = credentials.uid};
}

std::string socket_name(std::string_view purpose, std::string_view job) {
  return fmt::format("zeroth-{}-{}-{:016x}", purpose, ::getuid(), digest64(job));
}

std::optional<UniqueFd> listen_at(const std::string& name) {
  UniqueFd socket = make_socket();
  const Address address = abstract_address(name);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.address), address.length) != 0) {
    if (errno == EADDRINUSE) return std::nullopt;
    throw Error(ErrorCode::kResource, "bind of an abstract socket failed: " + errno_text(errno),
                {.where = "comm.unix_socket"});
  }
  ZR_CHECK(::listen(socket.get(), SOMAXCONN) == 0, ErrorCode::kResource, "listen failed: " + errno_text(errno),
           {.where = "comm.unix_socket"});
  return socket;
}

UniqueFd connect_to(const std::string& name, FunctionRef<void()> check) {
  using std::chrono::milliseconds;
  const Address address = abstract_address(name);
  for (milliseconds pause{1};; pause = std::min(pause * 2, milliseconds{20})) {
    UniqueFd socket = make_socket();
    const bool fails = ZR_FAILPOINT_ERRNO("unix_socket.connect");
    if (!fails && ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.address), address.length) == 0) {
      ZR_CHECK(identity_of(socket.get()).uid == ::getuid(), ErrorCode::kMismatch,
               "the meeting point of this job belongs to another user", {.where = "comm.unix_socket", .which = name});
      return socket;
    }
    ZR_CHECK(errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR, ErrorCode::kResource,
             "connect failed: " + errno_text(errno), {.where = "comm.unix_socket"});
    check();
    check_interrupt();
    std::this_thread::sleep_for(pause);
  }
}

UniqueFd accept_from(int listener) {
  return UniqueFd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

bool send_message(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors,
                  FunctionRef<void()> check) {
  ZR_ASSERT(descriptors.size() <= kMaxDescriptors, "too many descriptors for one message");
  iovec part{.iov_base = const_cast<std::byte*>(bytes.data()), .iov_len = bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size_bytes());
  }
  for (;;) {
    const ssize_t sent =
        ZR_FAILPOINT_ERRNO("unix_socket.send") ? -1 : ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return true;
    if (errno == EINTR) continue;
    if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN) return false;
    ZR_CHECK(errno == EAGAIN || errno == EWOULDBLOCK, ErrorCode::kResource, "sendmsg failed: " + errno_text(errno),
             {.where = "comm.unix_socket"});
    // The other side has not read what it was sent before.
    pollfd watched{.fd = socket, .events = POLLOUT, .revents = 0};
    if (::poll(&watched, 1, static_cast<int>(kWaitSlice.count())) > 0) continue;
    check();
    check_interrupt();
  }
}

bool send_message(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors) {
  const Deadline deadline(kSendPatience);
  return send_message(socket, bytes, descriptors, [&] {
    ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout, "the other side of a connection does not read",
             ErrorContext{.where = "comm.unix_socket",
                          .which = fmt::format("a message of {} bytes", bytes.size()),
                          .expected = fmt::format("room for it within {} ms", kSendPatience.count())});
  });
}

std::optional<Message> receive_message(int socket, std::size_t limit, FunctionRef<void()> check) {
  Message result;
  result.bytes.resize(limit);
  iovec part{.iov_base = result.bytes.data(), .iov_len = limit};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t received = -1;
  for (;;) {
    received =
        ZR_FAILPOINT_ERRNO("unix_socket.receive") ? -1 : ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (received >= 0 || (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK)) break;
    pollfd watched{.fd = socket, .events = POLLIN, .revents = 0};
    if (::poll(&watched, 1, static_cast<int>(kWaitSlice.count())) > 0) continue;
    check();
    check_interrupt();
  }
  if (received == 0 || (received < 0 && (errno == ECONNRESET || errno == EPIPE))) return std::nullopt;
  ZR_CHECK(received > 0, ErrorCode::kResource, "recvmsg failed: " + errno_text(errno), {.where = "comm.unix_socket"});
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t index = 0; index < count; ++index) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(header) + index * sizeof(int), sizeof(int));
      result.descriptors.emplace_back(descriptor);
    }
  }
  ZR_CHECK((message.msg_flags & MSG_CTRUNC) == 0, ErrorCode::kResource, "descriptors of peers could not be received",
           {.where = "comm.unix_socket", .hint = "raise the limit of open files (ulimit -n)"});
  result.bytes.resize(static_cast<std::size_t>(received));
  return result;
}

}  // namespace zeroth::detail
