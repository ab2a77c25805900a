// Messages over MPI, and where its library is found.
#pragma once

#include "comm/mpi/mpi_table.h"
#include "comm/mpi/mpi_world.h"

#include <zeroth/base/deadline.h>
#include <zeroth/comm/messages.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::detail {

/// Loads libzeroth_mpi.so, and with it MPI, for the rest of the process: ZEROTH_MPI_LIBRARY, or beside the program or
/// Python module that holds this code, in ../lib from there, or where the dynamic linker looks. Throws kEnvironment
/// with the places and what each said.
[[nodiscard]] const MpiTable& load_mpi();

/// The paths that load_mpi() tries, in order. `own`: file that holds this code; `variable`: value of
/// ZEROTH_MPI_LIBRARY.
[[nodiscard]] std::vector<std::string> mpi_library_places(const std::string& own,
                                                          const std::optional<std::string>& variable);

/// Messages between the ranks of MPI's world.
///
/// MPI is called by the thread that waits, no other: a thread of its own would add a hand-over to every message. What
/// is under way moves while somebody waits for something. A wait looks for the time of polling.h and as long as memory
/// takes to carry the message, then sleeps between looks (20 us, after a while 1 ms). abort() reaches the other ranks
/// as a message; their transfers, and all of them after it, throw kAborted. A transfer that is dropped and that MPI
/// does not give back within 100 ms leaves this rank without MPI: all later ones throw.
[[nodiscard]] std::shared_ptr<MessageTransport> make_mpi_transport(std::shared_ptr<MpiWorld> mpi);
/// The same over open_mpi_world().
[[nodiscard]] std::shared_ptr<MessageTransport> make_mpi_transport(const MpiTable& table, int rank, int size,
                                                                   const CommOptions& options);

}  // namespace zeroth::detail
