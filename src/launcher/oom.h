// Whether the kernel has ended processes for lack of memory: the only trace that it leaves where a job can see it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::launcher {

/// Of a text of /proc/self/cgroup: the files that may count it, the likeliest first (cgroup v2, v1; a container's own
/// root).
[[nodiscard]] std::vector<std::string> oom_files(std::string_view cgroups);
/// The number after "oom_kill" (memory.events, memory.oom_control); none if there is no such line.
[[nodiscard]] std::optional<std::int64_t> oom_kills_in(std::string_view text);
/// How many processes of this process's memory cgroup have been ended so, ever; none where the kernel does not say.
[[nodiscard]] std::optional<std::int64_t> count_oom_kills();

}  // namespace zeroth::launcher
