// Planted faults, so that tests can show that they would notice one. A header of its own: few files ask, and only they
// differ in a build that has the faults.
#pragma once

#include <cstdlib>
#include <string_view>

namespace zeroth {

#if defined(ZEROTH_MUTATIONS)
/// Whether the planted fault `name` is on: the environment variable ZEROTH_MUTATION chooses it. Only tests/mutations
/// builds this.
[[nodiscard]] inline bool planted(std::string_view name) noexcept {
  const char* chosen = std::getenv("ZEROTH_MUTATION");
  return chosen != nullptr && name == chosen;
}
#else
/// No fault is planted in a real build, and the compiler drops what asks.
[[nodiscard]] constexpr bool planted(std::string_view /*name*/) noexcept {
  return false;
}
#endif

}  // namespace zeroth
