// Reads the launcher's variables as every rank does, and ends with the exit code of what is wrong with them.
#include <zeroth/base/error.h>
#include <zeroth/engine/world.h>

#include <cstdio>

int main() {
  try {
    const zeroth::World world = zeroth::World::from_environment();
    std::printf("rank %d of %d over %s\n", world.rank(), world.size(), world.backend_name().c_str());
    return 0;
  } catch (const zeroth::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return zeroth::exit_code(error.code());
  }
}
