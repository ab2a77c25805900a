// What zeroth-run tells its ranks of ranks that have ended well: nobody can meet them any more.
//
// The launcher of each host writes a line a rank into memory of its own, and the ranks of that host read it there, by
// the path in ZEROTH_ENDED_RANKS. Nothing is left when the launcher ends. A rank of another launcher knows of none.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

inline constexpr const char* kEndedRanksVariable = "ZEROTH_ENDED_RANKS";

struct EndedRank {
  int rank = 0;
  int pid = 0;
  int exit_code = 0;
  std::string host{};  ///< "": that of the launcher that says it

  bool operator==(const EndedRank&) const = default;
};

/// "1 4711 0 node2\n".
[[nodiscard]] std::string line_of(const EndedRank& rank);
/// What stands before them: "job 7f3a 4\n".
[[nodiscard]] std::string head_of_ended_ranks(std::string_view job, int size);
/// The whole lines of a text, as far as they are of that form; none if the head is not that of this job.
[[nodiscard]] std::vector<EndedRank> ended_ranks_in(std::string_view text, std::string_view job, int size);

/// The first rank of this job that has ended and is not `own`: "rank 1 (pid 4711 on node2) exited with code 0 before
/// the ranks met". None where no launcher says so, and where the launcher's job is another one. `job` may be the
/// beginning of a longer name.
[[nodiscard]] std::optional<std::string> rank_that_never_came(std::string_view job, int own, int size);
/// Where that rank may be looked for.
inline constexpr const char* kNeverCameHint =
    "every rank of the job has to build the engine: look where that rank returned, for example under a condition that "
    "holds on some ranks only";

}  // namespace zeroth
