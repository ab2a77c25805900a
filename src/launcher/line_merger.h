// Holds the lines of the ranks for a moment, so that a line that several of them write is written once.
#pragma once

#include "launcher/output.h"
#include "launcher/said_once.h"

#include <zeroth/base/deadline.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zeroth::launcher {

/// Lines leave as "[ranks 0-3,7] text", of one rank as "[3] text". The order of each rank's lines is kept; between
/// ranks a line may leave up to kMergeWindow later than it came. A line of all ranks leaves at once.
class LineMerger {
 public:
  using TimePoint = SteadyClock::time_point;

  /// `mark`: "1:" in site 1, before the ranks.
  LineMerger(OutputSink& sink, int num_ranks, std::string mark = "")
      : sink_(&sink), num_ranks_(static_cast<std::size_t>(num_ranks)), mark_(std::move(mark)) {}

  /// `line` with its end, which stays as it is.
  void add(int rank, std::string_view line, TimePoint now);
  /// Writes what is complete or has waited long enough.
  void flush(TimePoint now);
  void flush_all();
  /// When flush() is due next; none if nothing waits.
  [[nodiscard]] std::optional<TimePoint> next() const { return waiting_.next(); }

 private:
  void write_first();

  OutputSink* sink_;
  std::size_t num_ranks_;
  std::string mark_;
  SaidOnce<int> waiting_;
  std::size_t waiting_bytes_ = 0;
};

inline constexpr Milliseconds kMergeWindow{100};

}  // namespace zeroth::launcher
