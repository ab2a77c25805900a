#include "base/unique_fd.h"

#include <zeroth/base/error.h>
#include <zeroth/base/surroundings.h>

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <system_error>
#include <utility>

namespace zeroth {
namespace {

/// "" for what has no such text.
std::string numeric(const sockaddr* address) {
  const bool six = address->sa_family == AF_INET6;
  if (!six && address->sa_family != AF_INET) return "";
  std::array<char, NI_MAXHOST> text{};
  const socklen_t length = six ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  return ::getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0 ? text.data() : "";
}

}  // namespace

std::string variable_or_empty(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

std::size_t allow_open_files(std::size_t wanted) {
  rlimit limit{};
  ZR_CHECK(::getrlimit(RLIMIT_NOFILE, &limit) == 0, ErrorCode::kResource,
           "cannot read the limit of open files: " + errno_text(errno));
  if (limit.rlim_cur < wanted && limit.rlim_cur < limit.rlim_max) {
    const rlimit raised{.rlim_cur = std::min<rlim_t>(wanted, limit.rlim_max), .rlim_max = limit.rlim_max};
    if (::setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  return limit.rlim_cur;
}

std::size_t count_open_files() {
  std::error_code unreadable;
  const std::filesystem::directory_iterator open("/proc/self/fd", unreadable);
  return unreadable ? 0 : static_cast<std::size_t>(std::distance(begin(open), end(open)));
}

std::string address_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(found, ::freeaddrinfo);
  std::string text;
  for (const addrinfo* entry = found; entry != nullptr && text.empty(); entry = entry->ai_next) {
    // Connecting a datagram socket sends nothing; it chooses the route, and with it our address.
    const UniqueFd socket(::socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    if (socket && ::connect(socket.get(), entry->ai_addr, entry->ai_addrlen) == 0 &&
        ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &length) == 0) {
      text = numeric(reinterpret_cast<const sockaddr*>(&own));
    }
  }
  return text;
}

std::vector<std::string> addresses_of(const std::string& name) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* first = nullptr;
  std::vector<std::string> found;
  if (name.empty() || ::getaddrinfo(name.c_str(), nullptr, &hints, &first) != 0) return found;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(first, ::freeaddrinfo);
  for (const addrinfo* entry = first; entry != nullptr; entry = entry->ai_next) {
    std::string address = numeric(entry->ai_addr);
    if (!address.empty() && std::ranges::find(found, address) == found.end()) found.push_back(std::move(address));
  }
  return found;
}

std::vector<Interface> interfaces() {
  ifaddrs* first = nullptr;
  std::vector<Interface> found;
  if (::getifaddrs(&first) != 0) return found;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> list(first, ::freeifaddrs);
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    if (std::string address = numeric(entry->ifa_addr); !address.empty()) {
      found.push_back(
          {.name = entry->ifa_name, .address = std::move(address), .loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0});
    }
  }
  return found;
}

}  // namespace zeroth
