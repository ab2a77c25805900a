// Who this process is when a launcher has started it as a rank of the doctor.
#pragma once

#include "doctor/wire.h"

#include <zeroth/comm/communicator.h>

#include <optional>
#include <string>
#include <vector>

namespace zeroth::doctor {

struct Place {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  int host = 0;
  int num_hosts = 1;
  std::string job{};
  std::string secret{};         ///< that all ranks have and nobody else
  std::vector<Endpoint> hub{};  ///< where rank 0 listens
  std::optional<Communicator>
      world{};  ///< where the launcher brings a transport between hosts (MPI), or mpirun has started the ranks
};

/// zeroth-run's variables are there, or mpirun's.
[[nodiscard]] bool started_as_rank();

/// By zeroth-run's variables; under another launcher ranks meet as training does, and rank 0 hands out where it
/// listens. `door` is made on rank 0. Throws Error: kEnvironment for variables that make no sense, and what the
/// transport throws.
[[nodiscard]] Place find_place(std::optional<Door>& door, Milliseconds timeout);

}  // namespace zeroth::doctor
