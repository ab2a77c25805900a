// What a process finds around it.
#pragma once

#include <string>

namespace zeroth {

/// Value of an environment variable; "" for one that is empty or not set.
[[nodiscard]] std::string variable_or_empty(const char* name);

/// As the kernel has it, not a name that a resolver knows; "" if it cannot be read.
[[nodiscard]] std::string host_name();

}  // namespace zeroth
