#include "step/job.h"

#include <zeroth/base/error.h>
#include <zeroth/engine/settings.h>

#include <ATen/Parallel.h>
#include <malloc.h>

#include <cstdlib>
#include <iostream>
#include <limits>
#include <memory>

namespace zeroth::benchmarks {

void set_malloc_mode(MallocMode mode) {
  if (mode == MallocMode::kDefault) return;
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
}

std::string launcher_prefix(const World& world) {
  return world.size() > 1 ? "zeroth-run -n " + std::to_string(world.size()) : "";
}

Communicator make_bench_communicator(const World& world) {
  return Communicator(world.connect(make_comm_options(Config{}, world.size()), std::make_shared<TrafficTable>()));
}

int run_job(const std::function<void(const World&)>& body) {
  try {
    const World world = World::from_environment();
    try {
      at::set_num_threads(1);
      body(world);
      return EXIT_SUCCESS;
    } catch (const std::exception& cause) {
      world.abort(cause);
      throw;
    }
  } catch (const std::exception& cause) {
    const Error error = error_of(cause);
    std::cerr << std::string(error.what()) + "\n";
    return exit_code(error.code());
  }
}

}  // namespace zeroth::benchmarks
