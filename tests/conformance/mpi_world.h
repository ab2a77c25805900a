// Worlds of MPI in the conformance suite. mpirun starts several copies of a test program; each is a rank that runs the
// same cases, and each world of a case is a new duplicate of MPI's.
#pragma once

#include "conformance/started_ranks.h"
#include "support/thread_groups.h"

#include <zeroth/comm/factory.h>

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

namespace zeroth::test {

/// Ranks that mpirun started, 0 without it.
[[nodiscard]] inline int mpi_world_size() {
  const char* const size = std::getenv("OMPI_COMM_WORLD_SIZE");
  return size == nullptr ? 0 : std::atoi(size);
}

/// "mpi" sums in rank order; "mpi_own_sums" makes MPI's own calls, and "mpi_own_sums_checked" compares them; "shm+mpi"
/// has shared memory inside nodes; "shm|mpi" has both, by the kind and size of a call.
[[nodiscard]] inline bool is_mpi_world(const std::string& backend) {
  return backend.starts_with("mpi") || backend == "shm+mpi" || backend == "shm|mpi";
}

/// Runs body(rank, backend) on this rank; every rank has the report of all.
[[nodiscard]] inline RankReport run_mpi_world(const std::string& name, const RankBody& body, CommOptions options,
                                              bool abort_on_failure) {
  if (name.starts_with("mpi_own_sums")) options.reduction = Reduction::kTransport;
  options.check_calls = name == "mpi_own_sums_checked";
  static int worlds = 0;
  const std::string job = std::string(std::getenv("PMIX_NAMESPACE")) + "." + std::to_string(worlds++);
  const auto world = [&](const std::string& kind, const CommOptions& with) {
    const int rank = std::atoi(std::getenv("OMPI_COMM_WORLD_RANK"));
    return std::shared_ptr<CommBackend>(
        make_backend(kind, {.rank = rank, .size = mpi_world_size(), .job = job, .hub = nullptr, .options = with}));
  };
  const auto group = [&] {
    if (name == "shm+mpi") return world(name, options);
    if (name != "shm|mpi") return world("mpi", options);
    const std::filesystem::path table = std::filesystem::temp_directory_path() /
                                        ("zeroth-calls-" + std::to_string(::getpid()));  // rank 0 reads its own
    std::ofstream(table) << table_of_both("shm", "mpi").to_json();
    options.call_table = table.string();
    std::shared_ptr<CommBackend> mixed = world(name, options);
    std::filesystem::remove(table);
    return mixed;
  };
  return run_started_rank({.group = group, .group_of_report = [&] { return world("mpi", quick_options()); }}, body,
                          abort_on_failure);
}

}  // namespace zeroth::test
