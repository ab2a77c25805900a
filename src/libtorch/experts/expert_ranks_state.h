// What the layers of an ExpertRanks share.
#pragma once

#include <zeroth/libtorch/expert_ranks.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

/// How many pieces a forward has, where that is measured: each candidate a few times, then the best one. All ranks of a
/// group have the same times, so they come to the same number.
class PieceTrials {
 public:
  /// Of the next forward; `most`: experts of the rank with fewest.
  [[nodiscard]] int next(std::int64_t most);
  /// This rank's time for the last forward, in nanoseconds.
  void measured(std::int64_t nanoseconds) {
    own_ = nanoseconds;
    measured_ = last_;
  }
  /// And forgets it; 0: it was not measured.
  [[nodiscard]] std::int64_t take_own() { return std::exchange(own_, 0); }
  /// The greatest of all ranks' take_own().
  void heard(std::int64_t nanoseconds);

 private:
  static constexpr int kTimes = 3;
  struct Candidate {
    int pieces;
    int times = 0;
    std::int64_t least = 0;
  };
  std::vector<Candidate> candidates_{{1}, {2}, {4}};
  std::size_t last_ = 0;
  std::size_t measured_ = 0;
  std::int64_t own_ = 0;
};

/// Ranks of the own node, and those of the same place in other nodes.
struct Hops {
  RankGroup inner;
  RankGroup outer;
};

struct ExpertRanks::State {
  RankGroup group;
  std::vector<std::string> axes{};
  std::optional<RankGroup> alike{};
  ExpertOptions options{};
  std::optional<Hops> hops{};  ///< made by the first two_hops
  PieceTrials trials{};
  int pieces = 1;
};

}  // namespace zeroth::libtorch
