// What two ranks must agree on before one reads what the other has written for a flat.
#pragma once

#include "zero/model_memory.h"

#include <cstdint>
#include <string>
#include <string_view>

namespace zeroth {

/// Digest of unit, dtype, trainability, factor, length, segments and boundaries; never 0, which is the tag of a rank
/// that has not said anything.
[[nodiscard]] std::uint64_t layout_tag(const ModelLayout& model, const FlatLayout& flat);

/// Throws kMismatch unless `source` lays the flat out as this rank does. `where` is "zero.gather", `what` "parameters",
/// `part` the thing of `source` that is about to be read: "shard".
void require_same_layout(const ModelLayout& model, const ModelMemory& memory, int flat, int source,
                         std::string_view where, std::string_view what, std::string_view part);

/// Context of a mismatch about `part` of `source`, without what was expected and what came.
[[nodiscard]] ErrorContext pull_context(const ModelLayout& model, const ModelMemory& memory, int flat, int source,
                                        std::string_view where, std::string_view part);

}  // namespace zeroth
