// Which Zeroth this is.
#pragma once

#include <string_view>

namespace zeroth {

/// "0.1.0", of the build that this code is part of. Ranks compare it before they train.
[[nodiscard]] std::string_view version_text() noexcept;

}  // namespace zeroth
