// A rank of mpirun that lives a small life; ZEROTH_FAULTS says where it fails.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include <zeroth/base/error.h>
#include <zeroth/comm/factory.h>

#include "process/rank_life.h"

namespace {

int variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? 0 : std::atoi(value);
}

}  // namespace

int main() {
  const int rank = variable("OMPI_COMM_WORLD_RANK");
  try {
    zeroth::testing::live({.seat = [rank] {
      zeroth::CommOptions options;
      options.timeout = zeroth::Milliseconds{20'000};
      return zeroth::make_backend(
          "mpi", {.rank = rank, .size = variable("OMPI_COMM_WORLD_SIZE"), .job = {}, .hub = nullptr, .options = options});
    }});
  } catch (const zeroth::Error& error) {
    std::fprintf(stderr, "rank %d ends: %s\n", rank, error.what());
    return zeroth::exit_code(error.code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d ends: %s\n", rank, error.what());
    return 1;
  }
  std::fprintf(stderr, "rank %d is whole\n", rank);
  return 0;
}
