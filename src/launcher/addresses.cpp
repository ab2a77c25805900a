#include "launcher/addresses.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <sstream>

namespace zeroth::launcher {

bool is_address(const std::string& text) {
  std::array<unsigned char, 16> bytes{};
  return ::inet_pton(AF_INET, text.c_str(), bytes.data()) == 1 ||
         ::inet_pton(AF_INET6, text.c_str(), bytes.data()) == 1;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

SshEnds ssh_ends(const std::string& connection) {
  std::istringstream words(connection);
  SshEnds ends;
  std::string port;
  words >> ends.client >> port >> ends.server;
  for (std::string* end : {&ends.client, &ends.server}) {
    if (!is_address(*end)) end->clear();
  }
  return ends;
}

std::string address_of(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(found, ::freeaddrinfo);
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    std::array<char, NI_MAXHOST> text{};
    const int failed = ::getnameinfo(
        entry->ai_addr, entry->ai_addrlen, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
    if (failed == 0 && !is_loopback(text.data())) return text.data();
  }
  return "";
}

}  // namespace zeroth::launcher
