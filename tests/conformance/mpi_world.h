// Worlds of MPI in the conformance suite. mpirun starts several copies of a test program; each is a rank that runs the same cases, and each
// world of a case is a new duplicate of MPI's.
#pragma once

#include "support/rank_report.h"
#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include <unistd.h>

namespace zeroth::test {

/// Ranks that mpirun started, 0 without it.
[[nodiscard]] inline int mpi_world_size() {
  const char* const size = std::getenv("OMPI_COMM_WORLD_SIZE");
  return size == nullptr ? 0 : std::atoi(size);
}

/// "mpi" sums in rank order; "mpi_own_sums" makes MPI's own calls, and "mpi_own_sums_checked" compares them; "shm+mpi" has shared memory inside nodes;
/// "shm|mpi" has both, by the kind and size of a call.
[[nodiscard]] inline bool is_mpi_world(const std::string& backend) {
  return backend.starts_with("mpi") || backend == "shm+mpi" || backend == "shm|mpi";
}

/// Runs body(rank, backend) on this rank; every rank has the report of all.
[[nodiscard]] inline RankReport run_mpi_world(const std::string& name, const RankBody& body, CommOptions options, bool abort_on_failure) {
  if (name.starts_with("mpi_own_sums")) options.reduction = Reduction::kTransport;
  options.check_calls = name == "mpi_own_sums_checked";
  struct Outcome {
    std::int32_t failed = 0;
    std::int32_t code = -1;
    std::array<char, 4'088> text{};
  };
  const int rank = std::atoi(std::getenv("OMPI_COMM_WORLD_RANK"));
  const int size = mpi_world_size();
  static int worlds = 0;
  const std::string job = std::string(std::getenv("PMIX_NAMESPACE")) + "." + std::to_string(worlds++);
  const auto world = [&](const std::string& kind, const CommOptions& with) {
    return std::shared_ptr<CommBackend>(make_backend(kind, {.rank = rank, .size = size, .job = job, .hub = nullptr, .options = with}));
  };
  const bool mixed = name == "shm|mpi";
  const std::filesystem::path table = std::filesystem::temp_directory_path() / ("zeroth-calls-" + std::to_string(::getpid()));  // rank 0 reads its own
  if (mixed) {
    std::ofstream(table) << table_of_both("shm", "mpi").to_json();
    options.call_table = table.string();
  }
  Outcome own;
  const auto failed = [&](const char* text, int code) {
    own.failed = 1;
    own.code = code;
    std::strncpy(own.text.data(), text, own.text.size() - 1);
  };
  {
    const std::shared_ptr<CommBackend> backend = world(mixed || name == "shm+mpi" ? name : "mpi", options);
    std::filesystem::remove(table);
    try {
      body(rank, backend);
    } catch (const Error& error) {
      if (abort_on_failure) backend->abort(error);
      failed(error.what(), static_cast<int>(error.code()));
    } catch (const std::exception& error) {
      if (abort_on_failure) backend->abort(Error(ErrorCode::kInternal, error.what()));
      failed(error.what(), -1);
    }
  }
  std::vector<Outcome> all(static_cast<std::size_t>(size));
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(&own);
  Communicator(world("mpi", quick_options()))
      .all_gather(std::span(bytes, sizeof own), std::span(reinterpret_cast<std::uint8_t*>(all.data()), all.size() * sizeof own));
  RankReport report;
  for (int other = 0; other < size; ++other) {
    const Outcome& outcome = all[static_cast<std::size_t>(other)];
    if (outcome.failed == 0) continue;
    report.failures.push_back(
        {.rank = other,
         .text = outcome.text.data(),
         .code = outcome.code < 0 ? std::nullopt : std::optional(static_cast<ErrorCode>(outcome.code))});
  }
  return report;
}

}  // namespace zeroth::test
