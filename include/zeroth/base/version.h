// The version of Zeroth.
#pragma once

#include <string_view>

namespace zeroth {

/// "0.1.0": the version of this build. Ranks compare it before they train.
[[nodiscard]] std::string_view version_text() noexcept;

}  // namespace zeroth
