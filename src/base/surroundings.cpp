#include <zeroth/base/surroundings.h>

#include <unistd.h>

#include <array>
#include <climits>
#include <cstdlib>

namespace zeroth {

std::string variable_or_empty(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

}  // namespace zeroth
