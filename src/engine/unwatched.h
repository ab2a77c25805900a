// Ranks that nobody watches, for benchmarks.
#pragma once

#include <zeroth/engine/world.h>

namespace zeroth::detail {

/// The same ranks of this host's processes, whose engines have no flight recorder, activity or control plane: nobody
/// says where a rank is that others wait for, and only their deadlines end that. For benchmarks, which measure what
/// those cost. Throws kUsage for ranks of a hub or a transport.
[[nodiscard]] World unwatched(const World& world);

}  // namespace zeroth::detail
