// Posting side of matched calls: from a Collective to what peers compare, and the error that prints both
// sides.
#pragma once

#include "comm/control_block.h"

#include <zeroth/comm/collective.h>

#include <string>

namespace zeroth::detail {

/// Everything that is compared; windows, color and key stay at their defaults.
[[nodiscard]] CallDescriptor describe_call(const Collective& collective, std::uint64_t sequence);

/// Whether two ranks mean the same call.
[[nodiscard]] bool same_call(const CallDescriptor& a, const CallDescriptor& b);

/// "all_gather#12 float32, 23 elements (92 B), unit 3, label 0".
[[nodiscard]] std::string text_of(const CallDescriptor& call);

}  // namespace zeroth::detail
