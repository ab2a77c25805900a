// Where all ranks of an engine come together.
#pragma once

#include <cstdint>

namespace zeroth {

/// Calls of an engine that all ranks make together.
enum class SyncPoint : std::uint8_t { kStep, kAverage, kBarrier, kBuffers, kExport, kClose, kRound };

}  // namespace zeroth
