// A rank of mpirun that lives a small life; ZEROTH_FAULTS says where it fails. `mpi_life calls SPEC`: a rank of a world
// with a control plane, which makes every call and fails by SPEC once all have met; ZEROTH_BACKEND says over what.
// `mpi_life own-sums SPEC`: MPI forms the sums.
#include "process/rank_life.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/factory.h>
#include <zeroth/engine/world.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace {

int variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? 0 : std::atoi(value);
}

void call_in_world(bool own_sums, std::string_view spec) {
  const zeroth::World world = zeroth::World::from_environment();
  zeroth::CommOptions options;
  options.timeout = options.first_timeout = zeroth::Milliseconds{60'000};
  options.nodes = world.backend_name() == "shm+mpi" ? std::vector<int>{0, 0, 1, 1} : std::vector<int>{};
  if (own_sums) options.reduction = zeroth::Reduction::kTransport;
  const zeroth::Communicator comm(world.connect(options, std::make_shared<zeroth::TrafficTable>()));
  zeroth::arm_failpoints(zeroth::parse_failpoints(std::string(spec)), world.rank());
  try {
    for (const std::size_t part : {10, 40'000}) zeroth::test::call_everything(comm, part);
    (void)comm.backend().split(0, world.rank(), "part");
    comm.barrier();
  } catch (const zeroth::Error& error) {
    world.abort(error);
    throw;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string_view> words(argv + 1, argv + argc);
  const int rank = variable("OMPI_COMM_WORLD_RANK");
  try {
    if (words.size() == 2) {
      call_in_world(words.front() == "own-sums", words.back());
      return 0;
    }
    zeroth::test::live({.group = [rank] {
      zeroth::CommOptions options;
      options.timeout = zeroth::Milliseconds{20'000};
      return zeroth::make_backend(
          "mpi",
          {.rank = rank, .size = variable("OMPI_COMM_WORLD_SIZE"), .job = {}, .hub = nullptr, .options = options});
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
