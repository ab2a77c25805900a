// Facts about the process and its host.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace zeroth {

/// Value of an environment variable; "" for one that is empty or not set.
[[nodiscard]] std::string variable_or_empty(const char* name);

/// The host name of the kernel, which a resolver may not know; "" if it cannot be read.
[[nodiscard]] std::string host_name();

/// The numeric address of this machine on the route to `host` (a name or an address); "" if there is no route. May
/// block for the DNS.
[[nodiscard]] std::string address_towards(const std::string& host);

/// The numeric addresses of `name` (a name or an address) from the resolver, each once; empty if it knows none. Blocks
/// for the resolver.
[[nodiscard]] std::vector<std::string> addresses_of(const std::string& name);

/// Returns the limit of open files of this process. If it is below `wanted`, it is raised as far as the system allows.
/// After that, code of this process that uses select() may get descriptors above 1,023. Throws kResource if the limit
/// cannot be read.
[[nodiscard]] std::size_t allow_open_files(std::size_t wanted);
/// Number of files that this process has open now; 0 if it cannot be read.
[[nodiscard]] std::size_t count_open_files();

/// One address of a network interface of this machine that is up: "eth0".
struct Interface {
  std::string name{};
  std::string address{};  ///< numeric; an interface with several addresses has several entries
  bool loopback = false;
};
/// All interfaces with an IPv4 or IPv6 address; empty, with errno set, if the kernel gives none.
[[nodiscard]] std::vector<Interface> interfaces();

}  // namespace zeroth
