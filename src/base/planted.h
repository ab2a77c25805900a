// Planted faults: tests show with them that they would notice a fault. A separate header, because only the few files
// that include it differ in a build with planted faults.
#pragma once

#include <cstdlib>
#include <string_view>

namespace zeroth {

#if defined(ZEROTH_MUTATIONS)
/// True if the planted fault `name` is on: the environment variable ZEROTH_MUTATION names it. Only tests/mutations
/// builds this.
[[nodiscard]] inline bool planted(std::string_view name) noexcept {
  const char* chosen = std::getenv("ZEROTH_MUTATION");
  return chosen != nullptr && name == chosen;
}
#else
/// A normal build has no planted faults, and the compiler removes the code that asks.
[[nodiscard]] constexpr bool planted(std::string_view /*name*/) noexcept {
  return false;
}
#endif

}  // namespace zeroth
