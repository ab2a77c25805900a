// Elements of a state, from whatever files of a checkpoint have them.
#pragma once

#include "checkpoint/rank_file.h"

#include <zeroth/checkpoint/box_range.h>

#include <cstddef>
#include <span>
#include <vector>

namespace zeroth {

/// A range in one of the files.
struct Source {
  std::size_t file = 0;
  detail::RankEntry entry{};
};

/// Reads the elements of `has`, of `element` bytes each, into `values`. False if some are in no file. Throws kIo,
/// kCheckpoint.
[[nodiscard]] bool read_elements(const BoxRange& has, std::size_t element, const std::vector<Source>& sources,
                                 std::vector<detail::KnownFile>& files, std::span<std::byte> values);

}  // namespace zeroth
