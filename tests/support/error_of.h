// What a call throws.
#pragma once

#include <zeroth/base/error.h>

#include <gtest/gtest.h>

#include <string>

namespace zeroth::test {

/// Text of the Error that `call` throws; the test fails without one, or with another code.
template <class Call>
std::string error_of(ErrorCode code, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

}  // namespace zeroth::test
