// Parts of what proc.cpp reads, with the files as arguments so that tests can make them up.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace zeroth {

/// The least that any memory cgroup of the process still leaves; nothing if none has a limit. `root` is where cgroups
/// are mounted (v2 at the root itself, v1 under "memory"), `own_groups` a file such as /proc/self/cgroup.
[[nodiscard]] std::optional<std::uint64_t> cgroup_left_bytes(const std::string& root, const std::string& own_groups);

}  // namespace zeroth
