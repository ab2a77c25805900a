// What the stores of an engine had moved at the ends of its steps, and the timeline of them.
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/comm/rank_activity.h>
#include <zeroth/engine/transfer_report.h>

#include <array>
#include <cstddef>
#include <deque>
#include <string>
#include <vector>

namespace zeroth {

/// Sums since the stores were made.
struct TransferTotals {
  std::array<StoreCounters, std::size(kBlockSets)> sets{};  ///< by BlockSet
  TransferTimes states{};
  StoreCounters activations{};
  TransferTimes activations_times{};
};

class TransferLog {
 public:
  /// A step has ended.
  void end_step(const TransferTotals& now);
  /// TransferReport::all begins here.
  void reset(const TransferTotals& now) { first_ = now; }
  /// Counts and times. The caller leaves out rows of sets without files, and adds what is planned.
  [[nodiscard]] TransferReport report(const TransferTotals& now) const;

  /// The rank enters a phase, in a unit of that number, or in none.
  void enter(SteadyClock::time_point at, Phase phase, int unit);
  /// Forgets the phases, and keeps the latest `most` from now on.
  void keep_phases(std::size_t most);
  struct Mark {
    SteadyClock::time_point at{};
    Phase phase = Phase::kStarting;
    int unit = -1;
  };
  [[nodiscard]] const std::deque<Mark>& marks() const { return marks_; }

 private:
  TransferTotals first_{};
  TransferTotals before_{};  ///< at the end of the step before the last one
  TransferTotals last_{};    ///< at the end of the last step
  std::size_t most_marks_ = 0;
  std::deque<Mark> marks_;
};

/// Chrome's trace format (chrome://tracing, ui.perfetto.dev): a process a rank, with threads for the phases and units
/// of the training, its waits for files, reads and writes. Times are those of the host's steady clock, so that traces
/// of ranks of one host can be laid beside each other.
[[nodiscard]] std::string chrome_trace(const std::deque<TransferLog::Mark>& marks,
                                       const std::vector<TransferSpan>& spans, const std::vector<std::string>& units,
                                       int rank, SteadyClock::time_point now);

}  // namespace zeroth
