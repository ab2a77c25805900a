// The records that failed ranks leave in the folder of the job's logs (ZEROTH_TRACE_DIR).
#pragma once

#include <string>

namespace zeroth::launcher {

/// Removes those of an earlier job or start.
void forget_records(const std::string& directory, int num_ranks) noexcept;
/// "logs/trace-rank1.jsonl": that of `rank`, or else of the lowest rank that has left one; "" where none has.
[[nodiscard]] std::string find_record(const std::string& directory, int rank, int num_ranks);

}  // namespace zeroth::launcher
