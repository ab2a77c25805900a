// Which rank is to blame where ranks differ: the odd one, not everybody who is unlike rank 0.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace zeroth {

struct OddRank {
  int usual =
      0;  ///< lowest rank of those that most agree with; the side of the lower rank where sides are equally large
  int odd = -1;  ///< lowest rank that differs from it; -1: none
};

/// `values`: one a rank.
[[nodiscard]] inline OddRank find_odd_rank(std::span<const std::int64_t> values) {
  OddRank found;
  if (std::ranges::all_of(values, [&](std::int64_t value) { return value == values.front(); }))
    return found;  // every step of a good job
  std::ptrdiff_t most = 0;
  for (std::size_t rank = 0; rank < values.size(); ++rank) {
    const std::ptrdiff_t alike = std::ranges::count(values, values[rank]);
    if (alike <= most) continue;
    most = alike;
    found.usual = static_cast<int>(rank);
  }
  const auto differs = [&](std::int64_t value) { return value != values[static_cast<std::size_t>(found.usual)]; };
  if (const auto odd = std::ranges::find_if(values, differs); odd != values.end())
    found.odd = static_cast<int>(odd - values.begin());
  return found;
}

}  // namespace zeroth
