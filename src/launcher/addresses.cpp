#include "launcher/addresses.h"

#include "launcher/unique_fd.h"

#include <zeroth/base/surroundings.h>

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>

#include <array>
#include <memory>

namespace zeroth::launcher {

std::string address_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), "9", &hints, &found) != 0) {
    return "";
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(found, ::freeaddrinfo);
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    // Connecting a datagram socket sends nothing; it chooses the route, and with it our address.
    const UniqueFd socket(::socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    std::array<char, NI_MAXHOST> text{};
    if (socket.valid() && ::connect(socket.get(), entry->ai_addr, entry->ai_addrlen) == 0 &&
        ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
        ::getnameinfo(reinterpret_cast<sockaddr*>(&own),
                      length,
                      text.data(),
                      text.size(),
                      nullptr,
                      0,
                      NI_NUMERICHOST) == 0) {
      return text.data();
    }
  }
  return "";
}

std::string ssh_client_address() {
  const std::string text = variable_or_empty("SSH_CONNECTION");
  const std::string address = text.substr(0, text.find(' '));
  std::array<unsigned char, 16> bytes{};
  const bool valid = ::inet_pton(AF_INET, address.c_str(), bytes.data()) == 1 ||
                     ::inet_pton(AF_INET6, address.c_str(), bytes.data()) == 1;
  return valid ? address : "";
}

}  // namespace zeroth::launcher
