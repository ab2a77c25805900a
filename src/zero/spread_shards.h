// Every rank's shard of a flat, to all ranks of its group. Pieces lie in the flat in another order than their ranks, so
// this is no all_gather.
#pragma once

#include <zeroth/comm/communicator.h>
#include <zeroth/shard/flat_layout.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace zeroth {

/// Collective, blocks. `whole`: the flat, elements of `element` bytes, which has this rank's shard and gets the others.
inline void spread_shards(const FlatLayout& flat, const Communicator& ranks, std::byte* whole, std::size_t element) {
  for (int owner = 0; owner < flat.world(); ++owner) {
    const Range part = flat.shard(owner);
    if (part.size() == 0) continue;
    ranks.broadcast(std::span(reinterpret_cast<std::uint8_t*>(whole) + static_cast<std::size_t>(part.begin) * element,
                              static_cast<std::size_t>(part.size()) * element),
                    owner);
  }
}

}  // namespace zeroth
