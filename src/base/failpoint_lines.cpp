#include "base/failpoint_lines.h"

#include <zeroth/base/failpoint_table.h>

#include <array>

namespace zeroth::detail {
namespace {

// Counted by cmake/failpoint_lines.cmake, one a row of the table.
constexpr auto kLines = std::to_array<int>({
#include "failpoint_lines.inc"
});
static_assert(kLines.size() == kFailpoints.size(),
              "cmake/failpoint_lines.cmake reads the table in another way than the compiler");

}  // namespace

int line_of_failpoint(std::size_t row) noexcept {
  return kLines[row];
}

}  // namespace zeroth::detail
