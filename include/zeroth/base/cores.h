// Number of processors of a rank.
#pragma once

namespace zeroth {

/// Number of processors of a rank with `allowed` processors in its affinity mask: all of them if they belong to this
/// rank only (`bound`), else the even share of its host's ranks. 0 if there are fewer processors than ranks.
[[nodiscard]] constexpr int cores_of_rank(int allowed, bool bound, int ranks_on_host) noexcept {
  return bound ? allowed : allowed / ranks_on_host;
}

/// The same for this process, from its affinity mask. It is bound if ZEROTH_BOUND_CORES is set, as zeroth-run does when
/// it binds.
[[nodiscard]] int cores_of_this_rank(int ranks_on_host) noexcept;

}  // namespace zeroth
