// Which backend is chosen for what, from times.
#include "bench/tuning.h"

#include <gtest/gtest.h>

namespace zeroth::bench {
namespace {

using Kind = CollectiveKind;
using Row = CallTable::Row;

Timing timing(Kind kind, std::uint64_t bytes, std::vector<double> shm, std::vector<double> mpi) {
  return {.kind = kind, .bytes = bytes, .microseconds = {{"shm", std::move(shm)}, {"mpi", std::move(mpi)}}};
}

TEST(Choose, RowsPartAtTheGeometricMeanOfNeighbours) {
  const CallTable table =
      choose({timing(Kind::kAllReduce, 65'536, {90}, {50}), timing(Kind::kAllReduce, 1'024, {5}, {9}),
              timing(Kind::kAllReduce, 4'096, {7}, {9}), timing(Kind::kAllReduce, 1'048'576, {500}, {900})},
             {"shm", "mpi"}, 0.05);
  EXPECT_EQ(table.rows(), (std::vector<Row>{{Kind::kAllReduce, 16'384, "shm"},
                                            {Kind::kAllReduce, 262'144, "mpi"},
                                            {Kind::kAllReduce, CallTable::kNoBound, "shm"}}));
}

TEST(Choose, TheFirstStaysUnlessAnotherIsFasterByTheGain) {
  const auto of = [](double mpi) {
    return choose({timing(Kind::kAllGather, 64, {100, 1, 100}, {mpi, mpi, 1'000})}, {"shm", "mpi"}, 0.05)
        .rows()
        .front()
        .backend;
  };
  EXPECT_EQ(of(96), "shm");
  EXPECT_EQ(of(94), "mpi");  // medians: the one round of 1 and the one of 1,000 do not count
}

TEST(Choose, CallsWithoutASizeHaveOneRow) {
  const CallTable table = choose({timing(Kind::kSend, 1'024, {10}, {11}), timing(Kind::kSend, 1'048'576, {900}, {300}),
                                  timing(Kind::kBarrier, 0, {3}, {9})},
                                 {"shm", "mpi"}, 0.05);
  EXPECT_EQ(table.rows(), (std::vector<Row>{{Kind::kSend, CallTable::kNoBound, "mpi"},
                                            {Kind::kBarrier, CallTable::kNoBound, "shm"}}));
}

}  // namespace
}  // namespace zeroth::bench
