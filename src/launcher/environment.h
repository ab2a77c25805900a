// What a rank finds in its environment, and the facts that are in it.
#pragma once

#include "launcher/host_task.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::launcher {

/// In a rank that is bound: how many processors it has for itself, all others are others'.
inline constexpr std::string_view kBoundVariable = "ZEROTH_BOUND_CORES";

/// The environment of this process as "NAME=VALUE".
[[nodiscard]] std::vector<std::string> current_environment();
/// 128 random bits as 32 hexadecimal digits. Throws Error(kResource) when the kernel refuses.
[[nodiscard]] std::string random_job_id();
/// Was free a moment ago on the loopback interface and is closed again, so that rank 0 may bind it
/// (torch.distributed does). Throws Error(kResource).
[[nodiscard]] int free_port();
/// Cores that this process may run on.
[[nodiscard]] int count_cores();
/// OMP_NUM_THREADS for the ranks of a host; 0: the user chose it, leave it alone.
[[nodiscard]] int threads_per_rank(const HostTask& task, int num_cores);
/// A variable as the user has set it for the ranks; the last one counts.
[[nodiscard]] std::optional<std::string> value_of(const HostTask& task, std::string_view name);
/// The user's OMP_NUM_THREADS, 0 if there is none or it is no number.
[[nodiscard]] int chosen_threads(const HostTask& task);
/// A variable in an environment of "NAME=VALUE"; the first one counts.
[[nodiscard]] std::optional<std::string> variable_in(const std::vector<std::string>& environment,
                                                     std::string_view name);
/// PATH in an environment.
[[nodiscard]] std::string search_path_of(const std::vector<std::string>& environment);

/// The whole environment of one rank as "NAME=VALUE": the launcher's, then ours over it, then `task.extra`
/// over both.
[[nodiscard]] std::vector<std::string> rank_environment(const HostTask& task, int local_rank, int num_threads);

}  // namespace zeroth::launcher
