// What backends do alike with messages that are started and asked for later.
#pragma once

#include "comm/function_ref.h"

#include <zeroth/base/error.h>
#include <zeroth/comm/collective.h>
#include <zeroth/comm/pending_points.h>
#include <zeroth/comm/progress.h>

#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace zeroth::detail {

/// validate()s each of them; throws kUsage for what is no message between two ranks.
void validate_points(std::span<const Collective> points, int rank, int size, std::string_view where);

/// No messages: done.
[[nodiscard]] std::unique_ptr<PendingPoints> nothing_pending();

/// What every call of a group throws once started messages went before they were done.
[[nodiscard]] Error given_up(std::string where, std::string who);

/// For a group over several backends, of which one has started `points`: they go on in the waits of the others, too.
/// `add` registers a Progress there; it is not called if all are done at once.
[[nodiscard]] std::unique_ptr<PendingPoints> also_moved_by(std::unique_ptr<PendingPoints> points,
                                                           FunctionRef<void(const std::weak_ptr<Progress>&)> add);

}  // namespace zeroth::detail
