// What the flight recorders of all ranks tell together: who has not made which call, and what everybody did last.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::trace {

/// One line of a rank's file (FlightRecorder::write()).
struct Call {
  std::string group{};
  std::uint64_t sequence = 0;
  std::string what{};  ///< "all_gather float32 [100] unit=3 label=1 (the parameters of unit blocks.2)": equal for calls
                       ///< that match
  std::string name{};  ///< "all_gather"; "wait" for what others put into shared memory
  std::string about{};  ///< "the parameters of unit blocks.2", or ""
  std::int64_t begun_ns = 0;
  std::int64_t ended_ns = 0;  ///< 0: has not ended, or has failed
};

struct RankTrace {
  int rank = 0;
  int size = 1;
  std::string host{};
  std::int64_t now_ns = 0;    ///< when it was written, by the rank's clock
  std::vector<Call> calls{};  ///< as they began
};

/// Throws Error(kIo) that names `file` and the line that is no such record.
[[nodiscard]] RankTrace parse(std::string_view text, const std::string& file);

/// Moves every rank's clock to rank 0's: calls of all ranks end together, within what a message takes. The median over
/// the calls that two ranks have in common; ranks of one host have one clock already. Ranks without common calls stay
/// as they are.
void align_clocks(std::vector<RankTrace>& ranks);

/// Lines about each group in which ranks differ: calls that do not match, calls that some have not begun, and calls
/// that none has ended. A rank's oldest call may have fallen out of its ring: what lies before it is not compared.
[[nodiscard]] std::vector<std::string> differences(const std::vector<RankTrace>& ranks);

/// One line a rank: the last `seconds` before the latest file, `columns` wide. '#': in a call, '>': in one that has not
/// ended, '.': outside.
[[nodiscard]] std::vector<std::string> draw(const std::vector<RankTrace>& ranks, double seconds, int columns);

}  // namespace zeroth::trace
