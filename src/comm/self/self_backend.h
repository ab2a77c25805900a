// SelfBackend: a world of one rank. Calls are copies; waits can only be satisfied by the predicate's own
// work.
#pragma once

#include <zeroth/comm/factory.h>

#include <memory>

namespace zeroth::detail {

[[nodiscard]] std::unique_ptr<CommBackend> make_self_backend(const CommOptions& options);

}  // namespace zeroth::detail
