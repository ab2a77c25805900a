// Degrees of sharding: the number of consecutive ranks that a state is split over. At degree d each run of d ranks has
// the whole state, and each rank of the run has one part. A flat is cut into one piece per rank; a part is a run of
// pieces:
//
//   8 ranks, degrees 2, 4 and 8     rank                 0  1  2  3  4  5  6  7
//                                   piece                0  4  2  6  1  5  3  7
//                                   part at degree 4     0  2  1  3  0  2  1  3    two pieces each
//                                   part at degree 2     0  1  0  1  0  1  0  1    four pieces each
//
// A rank's part at a higher degree lies inside its part at a lower degree, and every part is one range. Without degrees
// between 1 and the world size, rank r has piece r.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// The piece of each rank. `degrees` may be in any order. Throws kConfig unless each degree divides the next larger one
/// and the largest divides `world`.
[[nodiscard]] std::vector<int> pieces_of_ranks(int world, std::span<const int> degrees);

/// Ranks at equal distances: first, first + step, ...
struct SubGroup {
  int first = 0;
  int step = 1;
  int count = 1;
  [[nodiscard]] int rank(int index) const { return first + index * step; }
  /// Index of `rank` in the row; -1 if it is not in the row.
  [[nodiscard]] int index_of(int rank) const;
  bool operator==(const SubGroup&) const = default;
};

/// Ranks to gather among to go from degree `from` to `to`, a divisor of it: their parts at `from` make up the part of
/// `rank` at `to`. If no degree lies between the two, the ranks are in the order of their parts.
[[nodiscard]] SubGroup sub_group_of(int rank, int from, int to);

}  // namespace zeroth
