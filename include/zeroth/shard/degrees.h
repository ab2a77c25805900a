// Degrees of sharding: over how many consecutive ranks a state is split. At degree d each sub-group of d ranks has all
// of the state, and each rank of it a part. A flat is cut into one piece a rank, and parts are runs of pieces:
//
//   8 ranks, degrees 2, 4 and 8     rank                 0  1  2  3  4  5  6  7
//                                   piece                0  4  2  6  1  5  3  7
//                                   part at degree 4     0  2  1  3  0  2  1  3    two pieces each
//                                   part at degree 2     0  1  0  1  0  1  0  1    four pieces each
//
// A rank's part at a higher degree lies inside its part at a lower one, and every part is one range. Without degrees
// between 1 and the world rank r has piece r.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// The piece of each rank. `degrees` in any order; throws kConfig unless each of them divides the next larger one and
/// the largest the world.
[[nodiscard]] std::vector<int> pieces_of_ranks(int world, std::span<const int> degrees);

/// Ranks at equal distances.
struct SubGroup {
  int first = 0;
  int step = 1;
  int count = 1;
  [[nodiscard]] int rank(int index) const { return first + index * step; }
  /// Place of `rank` in it, -1 if it is not there.
  [[nodiscard]] int index_of(int rank) const;
  bool operator==(const SubGroup&) const = default;
};

/// Those whose parts at degree `from` make up the part that `rank` has at degree `to`, a divisor of it. In the order of
/// these parts, if no degree lies between the two.
[[nodiscard]] SubGroup sub_group_of(int rank, int from, int to);

}  // namespace zeroth
