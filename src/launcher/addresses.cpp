#include "launcher/addresses.h"

#include <zeroth/base/surroundings.h>

#include <arpa/inet.h>

#include <array>

namespace zeroth::launcher {

std::string ssh_client_address() {
  const std::string text = variable_or_empty("SSH_CONNECTION");
  const std::string address = text.substr(0, text.find(' '));
  std::array<unsigned char, 16> bytes{};
  const bool valid = ::inet_pton(AF_INET, address.c_str(), bytes.data()) == 1 ||
                     ::inet_pton(AF_INET6, address.c_str(), bytes.data()) == 1;
  return valid ? address : "";
}

}  // namespace zeroth::launcher
