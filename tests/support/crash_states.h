// What may be on a disk after the power has failed: a model of a file system that keeps only what was synced.
//
// [Note: Crash states] Of a file, what was written before its last fsync is there; of each later write all, nothing or
// some of its sectors, and the size may be that of any of them. Of a folder, names that were made, renamed or removed
// before the folder's last fsync are so; of each later change all or nothing, whatever the order. A file's fsync does
// not keep its name. Real file systems promise more. The calls up to a moment, and a seed, give one state.
#pragma once

#include "support/recorded_files.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace zeroth::test {

/// Makes the files below `to` that may be left of those below `root` if the power fails after `ops`.
void make_crash_state(std::span<const FileOp> ops, const std::string& root, std::uint64_t seed, const std::string& to);

}  // namespace zeroth::test
