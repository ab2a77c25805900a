// What the ranks of one host are to do. A value: it travels to the host as it is.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace zeroth::launcher {

/// The same for every rank of a job.
struct JobFacts {
  int num_ranks = 0;
  int num_nodes = 1;
  std::string job_id{};  ///< 128 random bits, hexadecimal; names the abstract socket of the rendezvous
  std::string master_address = "127.0.0.1";
  int master_port = 0;  ///< was free a moment ago on rank 0's host; nothing listens on it
  int restart = 0;      ///< how often the job has been started before
  int max_restarts = 0;

  bool operator==(const JobFacts&) const = default;
};

enum class BindCores { kOff, kAuto, kOn };

struct HostTask {
  JobFacts job{};
  int node = 0;
  int first_rank = 0;  ///< the host has the ranks [first_rank, first_rank + num_ranks)
  int num_ranks = 0;
  std::vector<std::string> command{};                        ///< program and its arguments, at least one
  std::vector<std::string> environment{};                    ///< "NAME=VALUE" of the launcher
  std::vector<std::pair<std::string, std::string>> extra{};  ///< over all others, in order
  std::string directory{};                                   ///< working directory; "" = as it is
  BindCores bind = BindCores::kAuto;
  int lost_after_ms = 10'000;  ///< a head that is silent for so long has gone

  bool operator==(const HostTask&) const = default;
};

}  // namespace zeroth::launcher
