// Which sanitizer this test was built with: some facts about memory do not hold under them.
#pragma once

#include <zeroth/base/platform.h>

namespace zeroth::testing {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddressSanitizer = true;
#else
inline constexpr bool kAddressSanitizer = false;
#endif
inline constexpr bool kSanitized = kAddressSanitizer || kThreadSanitizer;

}  // namespace zeroth::testing
