// Ranks as people write them.
#pragma once

#include <string>
#include <vector>

namespace zeroth {

/// "0-3,7" for sorted ranks {0, 1, 2, 3, 7}.
[[nodiscard]] std::string describe_ranks(const std::vector<int>& ranks);

}  // namespace zeroth
