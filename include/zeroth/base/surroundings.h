// What a process finds around it.
#pragma once

#include <string>
#include <vector>

namespace zeroth {

/// Value of an environment variable; "" for one that is empty or not set.
[[nodiscard]] std::string variable_or_empty(const char* name);

/// As the kernel has it, not a name that a resolver knows; "" if it cannot be read.
[[nodiscard]] std::string host_name();

/// The numeric address of this machine on the way to `host` (a name or an address); "" if there is no way. May ask the DNS.
[[nodiscard]] std::string address_towards(const std::string& host);

/// Of this machine, that is up: "eth0".
struct Interface {
  std::string name{};
  std::string address{};  ///< numeric; an interface that has several is there as often
  bool loopback = false;
};
/// Those with an address of IPv4 or IPv6; none if the kernel does not say.
[[nodiscard]] std::vector<Interface> interfaces();

}  // namespace zeroth
