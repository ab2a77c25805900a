#include <zeroth/base/cores.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

namespace zeroth {

int cores_of_this_rank(int ranks_on_host) noexcept {
  // The C++ library reads the affinity mask.
  const int allowed = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  return cores_of_rank(allowed, std::getenv("ZEROTH_BOUND_CORES") != nullptr, ranks_on_host);
}

}  // namespace zeroth
