#include "hosts/sockets.h"

#include <zeroth/base/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <string_view>

namespace zeroth {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddressList resolve(const std::string& host, int port, int flags, std::string& why) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) why = ::gai_strerror(status);
  return {status == 0 ? found : nullptr, ::freeaddrinfo};
}

void set(int socket, int level, int option, int value) {
  ::setsockopt(socket, level, option, &value, sizeof(value));
}

/// 0, or the errno of the address that came nearest.
int try_to_listen(const std::string& host, int port, UniqueFd& result, std::string& why) {
  int error = EADDRNOTAVAIL;
  const AddressList list = resolve(host, port, AI_PASSIVE, why);
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    UniqueFd socket(::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.valid()) continue;
    set(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1);
    if (::bind(socket.get(), entry->ai_addr, entry->ai_addrlen) == 0 && ::listen(socket.get(), 128) == 0) {
      result = std::move(socket);
      return 0;
    }
    if (error != EADDRINUSE) error = errno;
  }
  return error;
}

}  // namespace

std::string text_of(const Endpoint& endpoint) {
  const bool is_ipv6 = endpoint.host.find(':') != std::string::npos;
  return fmt::format("{}:{}", is_ipv6 ? "[" + endpoint.host + "]" : endpoint.host, endpoint.port);
}

UniqueFd listen_at(const Endpoint& endpoint) {
  UniqueFd socket;
  std::string why;
  int error = try_to_listen(endpoint.host, endpoint.port, socket, why);
  if (error == EADDRNOTAVAIL && why.empty()) error = try_to_listen("", endpoint.port, socket, why);
  if (error != 0) {
    throw Error(
        ErrorCode::kLaunch,
        fmt::format("cannot listen at {}: {}", text_of(endpoint), why.empty() ? errno_text(error) : why),
        {.where = "--rdzv",
         .hint = error == EADDRINUSE ? "another program, or another job, has this port; choose another one on all nodes"
                                     : "node 0 listens at an address of its own; the others give the same"});
  }
  return socket;
}

UniqueFd accept_one(int listening, std::string& address) {
  sockaddr_storage peer{};
  socklen_t length = sizeof(peer);
  UniqueFd socket(::accept4(listening, reinterpret_cast<sockaddr*>(&peer), &length, SOCK_CLOEXEC | SOCK_NONBLOCK));
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (socket.valid() && ::getnameinfo(reinterpret_cast<sockaddr*>(&peer), length, host.data(), host.size(), port.data(),
                                      port.size(), NI_NUMERICHOST | NI_NUMERICSERV) == 0) {
    address = fmt::format("{}:{}", host.data(), port.data());
  }
  return socket;
}

std::string local_address(int socket) {
  sockaddr_storage own{};
  socklen_t length = sizeof(own);
  std::array<char, NI_MAXHOST> host{};
  auto* generic = reinterpret_cast<sockaddr*>(&own);
  if (::getsockname(socket, generic, &length) != 0 ||
      ::getnameinfo(generic, length, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return "";
  }
  constexpr std::string_view kMapped = "::ffff:";
  const std::string text = host.data();
  return text.starts_with(kMapped) ? text.substr(kMapped.size()) : text;
}

UniqueFd connect_once(const Endpoint& endpoint, Milliseconds patience, std::string& why) {
  const AddressList list = resolve(endpoint.host, endpoint.port, 0, why);
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    UniqueFd socket(::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.valid()) continue;
    int error = ::connect(socket.get(), entry->ai_addr, entry->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      pollfd ready{.fd = socket.get(), .events = POLLOUT, .revents = 0};
      socklen_t length = sizeof(error);
      if (::poll(&ready, 1, static_cast<int>(patience.count())) != 1) {
        error = ETIMEDOUT;
      } else if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) {
        error = errno;
      }
    }
    if (error == 0) return socket;
    why = errno_text(error);
  }
  return UniqueFd();
}

}  // namespace zeroth
