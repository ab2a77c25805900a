#include "launcher/addresses.h"

#include <zeroth/base/surroundings.h>

#include <arpa/inet.h>

#include <array>
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
  for (const std::string& address : addresses_of(host)) {
    if (!is_loopback(address)) return address;
  }
  return "";
}

}  // namespace zeroth::launcher
