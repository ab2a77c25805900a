// What a rank finds in its environment.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::launcher {

/// Facts of one job that every rank is told.
struct JobFacts {
  int num_ranks = 0;
  std::string job_id{};  ///< 128 random bits, hexadecimal; names the abstract socket of the rendezvous
  int master_port = 0;   ///< was free a moment ago; nothing listens on it
  int omp_threads = 0;   ///< 0: the user chose OMP_NUM_THREADS, leave it alone
  int num_cores = 0;     ///< cores this process may run on
};

/// Draws the job id, finds a free port, counts cores. `parent` is the environment of zeroth-run as
/// "NAME=VALUE", `extra` what --env adds. Throws Error(kResource) when the kernel refuses.
[[nodiscard]] JobFacts make_job_facts(int num_ranks,
                                      std::span<const std::string> parent,
                                      std::span<const std::pair<std::string, std::string>> extra);

/// The whole environment of one rank as "NAME=VALUE": the parent's, then ours over it, then --env over both.
[[nodiscard]] std::vector<std::string> rank_environment(
    const JobFacts& job,
    int rank,
    std::span<const std::string> parent,
    std::span<const std::pair<std::string, std::string>> extra);

}  // namespace zeroth::launcher
