// Starting a rank: fork and exec without a shell, with every failure reported before the first rank's work
// begins.
#pragma once

#include "base/unique_fd.h"
#include "launcher/rank_process.h"
#include "launcher/signals.h"

#include <sys/resource.h>

#include <csignal>
#include <optional>
#include <string>
#include <vector>

namespace zeroth::launcher {

[[nodiscard]] bool is_runnable(const std::string& path);
/// The first executable file `program` of the directories in `search_path` (PATH).
[[nodiscard]] std::optional<std::string> look_up(const std::string& program, const std::string& search_path);
/// Throws Error: kUsage (no such file), kEnvironment (not executable), kResource, kLaunch, by `error_number`.
[[noreturn]] void cannot_start(const std::string& program, int error_number, std::string hint = "check the path");

/// The file that execve will get for PROGRAM: itself if it holds a '/', else the first match in `search_path`
/// (PATH). Throws Error: kUsage (there is no such file), kEnvironment (not executable).
[[nodiscard]] std::string find_program(const std::string& program, const std::string& search_path);

/// Makes room for the descriptors of `num_ranks` ranks (`per_rank` each) and returns the limit to give back
/// to them. Throws Error(kResource) before anything is started if the hard limit is too low.
[[nodiscard]] rlimit reserve_descriptors(int num_ranks, int per_rank);

struct SpawnPlan {
  std::string program{};                   ///< from find_program
  std::vector<std::string> arguments{};    ///< argv, argv[0] included
  std::vector<std::string> environment{};  ///< "NAME=VALUE", complete
  int stdin_fd = -1;                       ///< becomes the rank's standard input; borrowed
  rlimit descriptors{};                    ///< RLIMIT_NOFILE of the rank
  std::vector<int> processors{};           ///< where it may run; empty = as we may
  int death_signal = SIGKILL;              ///< what it gets when the calling thread dies
  bool own_session = false;                ///< what is sent to the launcher's session is not for it
};

struct SpawnedRank {
  RankProcess process;
  UniqueFd out;  ///< read end of its standard output, non-blocking
  UniqueFd err;  ///< read end of its standard error, non-blocking
};

/// Starts one rank as the leader of a new process group (or session), with pipes as its output, that dies with the
/// calling thread (PR_SET_PDEATHSIG). Blocks until the program has been loaded. Throws Error: kUsage (no such file),
/// kEnvironment (not executable), kResource (processes, memory, descriptors), kLaunch (anything else).
[[nodiscard]] SpawnedRank spawn_rank(const SpawnPlan& plan, const InheritedSignals& inherited);

}  // namespace zeroth::launcher
