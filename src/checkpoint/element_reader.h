// Elements of a state, from whatever files have them.
#pragma once

#include "checkpoint/rank_file.h"

#include <zeroth/checkpoint/box_range.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace zeroth::detail {

/// A range in one of the files of a checkpoint.
struct Source {
  std::size_t file = 0;
  RankEntry entry{};
};

/// Reads the elements of `has`, of `element` bytes each, into `values`, in the order of the range. Every byte that is
/// read is compared with its file's digests. Sources in another order of dimensions are read whole, and their elements
/// put in place one by one. False if some elements are in no source. Throws kIo, kCheckpoint.
[[nodiscard]] bool read_elements(const BoxRange& has, std::size_t element, const std::vector<Source>& sources,
                                 std::vector<KnownFile>& files, std::span<std::byte> values);

/// How often the elements of a tensor are there.
struct Coverage {
  std::int64_t missing = 0;        ///< elements that no source has
  std::int64_t first_missing = 0;  ///< in the order of the sources, as Run::logical; only if missing > 0
  std::int64_t twice = 0;          ///< elements that are there once more than once is
  std::int64_t first_twice = 0;    ///< only if twice > 0
  bool operator==(const Coverage&) const = default;
};

/// Of a tensor with so many elements, whose sources are all in one order of dimensions.
[[nodiscard]] Coverage coverage_of(std::int64_t elements, const std::vector<Source>& sources);

}  // namespace zeroth::detail
