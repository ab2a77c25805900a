// What a process finds around it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace zeroth {

/// Value of an environment variable; "" for one that is empty or not set.
[[nodiscard]] std::string variable_or_empty(const char* name);

/// As the kernel has it, not a name that a resolver knows; "" if it cannot be read.
[[nodiscard]] std::string host_name();

/// The numeric address of this machine on the way to `host` (a name or an address); "" if there is no way. May ask the
/// DNS.
[[nodiscard]] std::string address_towards(const std::string& host);

/// What `name`, a name or an address, stands for: numeric addresses as the resolver has them, each once; none if it
/// knows none. Blocks as long as the resolver does.
[[nodiscard]] std::vector<std::string> addresses_of(const std::string& name);

/// How many files this process may have open; where that is less than `wanted`, raised as far as the system lets it.
/// Others of this process that use select() see numbers above 1,023 from then on. Throws kResource if the system does
/// not say.
[[nodiscard]] std::size_t allow_open_files(std::size_t wanted);
/// How many it has open now; 0 if the system does not say.
[[nodiscard]] std::size_t count_open_files();

/// Of this machine, that is up: "eth0".
struct Interface {
  std::string name{};
  std::string address{};  ///< numeric; an interface that has several is there as often
  bool loopback = false;
};
/// Those with an address of IPv4 or IPv6; none, with errno, if the kernel does not say.
[[nodiscard]] std::vector<Interface> interfaces();

}  // namespace zeroth
