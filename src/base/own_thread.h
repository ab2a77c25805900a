// Threads that are Zeroth's own.
#pragma once

#include <zeroth/base/error.h>

#include <functional>
#include <string_view>
#include <thread>

namespace zeroth::detail {

/// A thread with all signals blocked: those belong to the threads of the program. Throws kResource where there can be
/// none, with `purpose`
/// ("the heartbeat") and the context.
[[nodiscard]] std::thread start_own_thread(std::function<void()> body, std::string_view purpose, ErrorContext context);

}  // namespace zeroth::detail
