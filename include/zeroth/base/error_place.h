// ErrorPlace: rank, step and call of an error as values, for programs.
#pragma once

#include <zeroth/base/error.h>

#include <cstdint>
#include <optional>
#include <string>

namespace zeroth {

/// Read from the context. `who` is, or begins with, "rank 3/8", "rank 3/8, step 120 (forward)" or "rank 3/8, after step
/// 120".
struct ErrorPlace {
  std::optional<int> rank{};           ///< of `who`
  std::optional<std::int64_t> step{};  ///< of `who`: the running step, or the last one
  std::string op{};  ///< "all_gather#841", from `expected` or `where`: the call with its number in its group; "": none
  bool operator==(const ErrorPlace&) const = default;
};
[[nodiscard]] ErrorPlace place_of(const ErrorContext& context);

}  // namespace zeroth
