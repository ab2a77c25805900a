// The reaction to different numbers of batches on the ranks of an epoch.
#pragma once

#include <cstdint>

namespace zeroth {

/// What happens if some ranks have no batch and others have; see Engine::next_batch().
enum class Uneven : std::uint8_t {
  kError,  ///< kMismatch on all ranks: names the ranks without a batch and the ranks with one
  kDrop,   ///< the loops of all ranks end
  kJoin,   ///< a rank without a batch takes part with weight zero until no rank has one
};

}  // namespace zeroth
