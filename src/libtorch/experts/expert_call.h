// Errors of the calls of experts.
#pragma once

#include <string>

namespace zeroth::libtorch {

/// Throws kUsage for argument `which` of a call.
[[noreturn]] void refuse_experts(const std::string& who, const char* which, const std::string& message,
                                 std::string expected, std::string got);

}  // namespace zeroth::libtorch
