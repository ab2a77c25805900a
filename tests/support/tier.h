// Which tier the case that runs belongs to; see LONG in cmake/ZerothFunctions.cmake.
#pragma once

#include <gtest/gtest.h>

#include <string_view>

namespace zeroth::test {

/// Cases whose full name begins with Long, as those of INSTANTIATE_TEST_SUITE_P(Long, ...). In a case of a test only.
[[nodiscard]] inline bool in_long_tier() {
  return std::string_view(::testing::UnitTest::GetInstance()->current_test_info()->test_suite_name())
      .starts_with("Long");
}

}  // namespace zeroth::test
