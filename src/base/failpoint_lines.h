// Where the failpoints are in the sources of this build.
#pragma once

#include <cstddef>

namespace zeroth::detail {

/// The line of the first place that names the row.
[[nodiscard]] int line_of_failpoint(std::size_t row) noexcept;

}  // namespace zeroth::detail
