// Which address of this machine others reach it by.
#pragma once

#include <string>

namespace zeroth::launcher {

/// The two ends of an ssh connection as sshd has them: the head as the host sees it, and the host as the head
/// reaches it. "" for what is no numeric address.
struct SshEnds {
  std::string client{};
  std::string server{};
};
/// `connection`: the value of SSH_CONNECTION.
[[nodiscard]] SshEnds ssh_ends(const std::string& connection);

/// Numeric, of IPv4 or IPv6.
[[nodiscard]] bool is_address(const std::string& text);
/// For a numeric address.
[[nodiscard]] bool is_loopback(const std::string& address);
/// The first numeric address of `host` that is not a loopback one, "" if there is none. May ask the DNS.
[[nodiscard]] std::string address_of(const std::string& host);

}  // namespace zeroth::launcher
