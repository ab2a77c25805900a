// What becomes of an epoch in which ranks have different numbers of batches.
#pragma once

#include <cstdint>

namespace zeroth {

/// What happens where ranks run out of batches at different times; see Engine::next_batch().
enum class Uneven : std::uint8_t {
  kError,  ///< Error on all ranks, naming those that have none and those that have more
  kDrop,   ///< all end with the first
  kJoin,   ///< who has none takes part with weight zero until nobody has one
};

}  // namespace zeroth
