// How a dim of a tensor is cut over ranks.
#pragma once

#include <cstdint>
#include <vector>

namespace zeroth {

/// Slices of `elements` indices for `ranks` ranks, as equal as can be: the first elements % ranks have one more. Throws
/// kUsage for less than 0 elements or 1 rank.
[[nodiscard]] std::vector<std::int64_t> slice_sizes(std::int64_t elements, int ranks);

}  // namespace zeroth
