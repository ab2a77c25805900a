#include <zeroth/base/error.h>
#include <zeroth/parallel/slices.h>

#include <cstddef>
#include <string>

namespace zeroth {

std::vector<std::int64_t> slice_sizes(std::int64_t elements, int ranks) {
  ZR_CHECK(elements >= 0 && ranks >= 1, ErrorCode::kUsage, "there is no such cut",
           {.where = "parallel.slices",
            .expected = "elements from 0 and ranks from 1",
            .got = std::to_string(elements) + " elements, " + std::to_string(ranks) + " ranks"});
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(ranks), elements / ranks);
  for (std::int64_t rank = 0; rank < elements % ranks; ++rank) ++sizes[static_cast<std::size_t>(rank)];
  return sizes;
}

}  // namespace zeroth
