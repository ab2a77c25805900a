#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/shard/degrees.h>

#include <algorithm>

namespace zeroth {

std::vector<int> pieces_of_ranks(int world, std::span<const int> degrees) {
  std::vector<int> chain(degrees.begin(), degrees.end());
  chain.push_back(world);
  std::ranges::sort(chain);
  int below = 1;
  for (const int degree : chain) {
    if (degree >= below && degree <= world && degree % below == 0) {
      below = degree;
      continue;
    }
    std::vector<std::string> asked;
    for (const int other : degrees) asked.push_back(std::to_string(other));
    throw Error(
        ErrorCode::kConfig, "states cannot be split over so many ranks",
        {.where = "shard.degrees",
         .expected = "degrees from 1 to " + std::to_string(world) + ", the number of ranks, each a divisor of the next",
         .got = join(asked, ", ")});
  }
  std::vector<int> pieces;
  for (int rank = 0; rank < world; ++rank) {
    // The rank's digits in the mixed radix of the degrees, in reverse order.
    int piece = 0;
    int lower = 1;
    for (const int degree : chain) {
      piece += rank % degree / lower * (world / degree);
      lower = degree;
    }
    pieces.push_back(piece);
  }
  return pieces;
}

int SubGroup::index_of(int rank) const {
  const int distance = rank - first;
  return distance >= 0 && distance % step == 0 && distance / step < count ? distance / step : -1;
}

SubGroup sub_group_of(int rank, int from, int to) {
  ZR_ASSERT(to >= 1 && from % to == 0, "a part is made of parts of a multiple of its degree");
  return {.first = rank / from * from + rank % to, .step = to, .count = from / to};
}

}  // namespace zeroth
