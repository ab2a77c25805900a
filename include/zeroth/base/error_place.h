// ErrorPlace: what the texts of an error say in numbers, for programs.
#pragma once

#include <zeroth/base/error.h>

#include <cstdint>
#include <optional>
#include <string>

namespace zeroth {

/// `who` is "rank 3/8", "rank 3/8, step 120 (forward)" or "rank 3/8, after step 120", or begins so.
struct ErrorPlace {
  std::optional<int> rank{};           ///< of `who`
  std::optional<std::int64_t> step{};  ///< of `who`: the one in which it was, or the last one
  std::string
      op{};  ///< "all_gather#841", of `expected` or `where`: the call, numbered in its group; "" where there is none
  bool operator==(const ErrorPlace&) const = default;
};
[[nodiscard]] ErrorPlace place_of(const ErrorContext& context);

}  // namespace zeroth
