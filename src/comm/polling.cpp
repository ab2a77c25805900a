#include "comm/polling.h"

#include <zeroth/base/cores.h>

#include <thread>

namespace zeroth::detail {

void Polling::pause() const noexcept {
  if (yields) {
    std::this_thread::yield();
  } else {
    __builtin_ia32_pause();  // less power, more for the sibling thread
  }
}

Polling polling_of(std::optional<std::chrono::microseconds> wanted, int ranks_on_host) {
  constexpr std::chrono::microseconds kOwnCore{20};
  constexpr std::chrono::microseconds kSharedCore{50};
  const bool crowded = cores_of_this_rank(ranks_on_host) < 1;
  return {.time = wanted.value_or(crowded ? kSharedCore : kOwnCore), .yields = crowded};
}

}  // namespace zeroth::detail
