// How many processors a rank may count on.
#pragma once

namespace zeroth {

/// Of `allowed` processors in a rank's affinity mask: all if they are its own (`bound`), else its part beside
/// the other ranks of its host; 0 if there are fewer than ranks.
[[nodiscard]] constexpr int cores_of_rank(int allowed, bool bound, int ranks_on_host) noexcept {
  return bound ? allowed : allowed / ranks_on_host;
}

/// The same for this process: its affinity mask, bound if ZEROTH_BOUND_CORES is set (zeroth-run does it where
/// it binds).
[[nodiscard]] int cores_of_this_rank(int ranks_on_host) noexcept;

}  // namespace zeroth
