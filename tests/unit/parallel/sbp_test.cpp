#include "support/error_of.h"

#include <zeroth/parallel/sbp.h>
#include <zeroth/parallel/slices.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace zeroth {
namespace {

const std::vector<Sbp> kWays{Sbp::split(0), Sbp::split(1), Sbp::broadcast(), Sbp::partial()};

/// Elements that a rank must get from others to have what `to` says, when it has what `from` says: by looking at every
/// element of a matrix.
std::int64_t counted(const Sbp& from, const Sbp& to, std::int64_t rows, std::int64_t columns, int ranks) {
  const auto owner = [ranks](std::int64_t index, std::int64_t size) {
    int rank = 0;
    for (const std::int64_t slice : slice_sizes(size, ranks)) {
      if (index < slice) return rank;
      index -= slice;
      ++rank;
    }
    return rank;
  };
  std::int64_t bytes = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      const auto of = [&](const Sbp& sbp) { return sbp.dim() == 0 ? owner(row, rows) : owner(column, columns); };
      if (from.is_split() && to.is_split()) bytes += of(from) != of(to);
      if (from.is_split() && to.kind() == Sbp::Kind::kBroadcast) bytes += ranks - 1;
      if (from.kind() == Sbp::Kind::kPartial && to.is_split()) bytes += ranks - 1;
      // The owner of a slice gets it from all others, and all others get the sum from the owner.
      if (from.kind() == Sbp::Kind::kPartial && to.kind() == Sbp::Kind::kBroadcast) bytes += 2 * (ranks - 1);
    }
  }
  return bytes;
}

TEST(Sbp, BytesAreThoseOfEveryElement) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const Sbp& from : kWays) {
      for (const Sbp& to : kWays) {
        const std::vector<std::int64_t> shape{101, 97};  // more than 8 KiB, slices of two sizes
        EXPECT_EQ(conversion_bytes(from, to, shape, 8, ranks), 8 * counted(from, to, 101, 97, ranks))
            << describe(from) << " to " << describe(to) << ", " << ranks << " ranks";
      }
    }
  }
  const std::vector<std::int64_t> small{16, 64};  // one phase: every rank gets the others' parts
  EXPECT_EQ(conversion_bytes(Sbp::partial(), Sbp::broadcast(), small, 8, 4), 4 * 3 * 8192);
  EXPECT_EQ(conversion_bytes(Sbp::split(0), Sbp::split(1), 1024, 4, 4), 3072);
}

TEST(Sbp, GradientsGoTheReverseWay) {
  EXPECT_EQ(gradient_of(Sbp::split(2)), Sbp::split(2));
  EXPECT_EQ(gradient_of(Sbp::partial()), Sbp::broadcast());
  EXPECT_EQ(gradient_of(Sbp::broadcast()), Sbp::partial());
  EXPECT_EQ(gradient_of(Sbp::broadcast(), BroadcastGradients::kAlike), Sbp::broadcast());
  EXPECT_EQ(describe(Sbp::split(-1)) + describe(Sbp::broadcast()) + describe(Sbp::partial()), "S(-1)BP");
}

TEST(Sbp, OddSizesAreRefused) {
  const std::vector<std::int64_t> shape{4, 4};
  const auto refused = [&](const Sbp& from, const Sbp& to, std::int64_t element_bytes, int ranks) {
    return test::error_of(ErrorCode::kUsage, [&] { (void)conversion_bytes(from, to, shape, element_bytes, ranks); });
  };
  EXPECT_NE(refused(Sbp::split(2), Sbp::broadcast(), 4, 2).find("S(2); expected: -2 to 1"), std::string::npos);
  EXPECT_NE(refused(Sbp::partial(), Sbp::split(-3), 4, 2).find("S(-3)"), std::string::npos);
  EXPECT_NE(refused(Sbp::partial(), Sbp::broadcast(), 0, 2).find("of 0 bytes"), std::string::npos);
  EXPECT_NE(refused(Sbp::partial(), Sbp::broadcast(), 4, 0).find("0 ranks"), std::string::npos);
  (void)test::error_of(ErrorCode::kUsage, [] { (void)slice_sizes(-1, 2); });
  EXPECT_EQ(slice_sizes(7, 3), (std::vector<std::int64_t>{3, 2, 2}));
}

}  // namespace
}  // namespace zeroth
