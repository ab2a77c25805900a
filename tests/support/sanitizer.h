// Which sanitizer this test was built with: some facts about memory do not hold under them.
#pragma once

#include <zeroth/base/platform.h>

namespace zeroth::test {

inline constexpr bool kSanitized = kAddressSanitizer || kThreadSanitizer;

}  // namespace zeroth::test
