#include <kernels/common/dispatch.h>
#include <zeroth/base/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace zeroth::kernels {
namespace {

TEST(Dispatch, ScalarIsAlwaysThereAndTheBestSetIsSupported) {
  EXPECT_TRUE(is_supported(Isa::kScalar));
  EXPECT_TRUE(is_supported(best_isa()));
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    EXPECT_EQ(is_supported(isa), isa <= best_isa());
  }
}

TEST(Dispatch, DescriptionNamesTheChosenSet) {
  EXPECT_THAT(describe_isa(), ::testing::StartsWith(std::string(name_of(best_isa())) + " ("));
}

TEST(Dispatch, TheEnvironmentMayAskForLessAndNothingElse) {
  const char* before = std::getenv("ZEROTH_ISA");
  const std::string kept = before == nullptr ? "" : before;
  ::setenv("ZEROTH_ISA", "scalar", 1);
  EXPECT_NO_THROW(require_isa_override());
  for (const char* wrong : {"", "AVX2", "sse2", "avx5120"}) {
    ::setenv("ZEROTH_ISA", wrong, 1);
    try {
      require_isa_override();
      ADD_FAILURE() << '"' << wrong << "\" was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kEnvironment);
      EXPECT_THAT(error.what(),
                  ::testing::AllOf(::testing::HasSubstr("ZEROTH_ISA"), ::testing::HasSubstr("scalar, avx2 or avx512")));
    }
  }
  if (before == nullptr) {
    ::unsetenv("ZEROTH_ISA");
  } else {
    ::setenv("ZEROTH_ISA", kept.c_str(), 1);
  }
}

TEST(Dispatch, RefusesASetThatDoesNotExist) {
  const auto newer = static_cast<Isa>(7);
  EXPECT_FALSE(is_supported(newer));
  EXPECT_THROW(detail::require_supported(newer, "adamw"), Error);
  EXPECT_NO_THROW(detail::require_supported(best_isa(), "adamw"));
}

}  // namespace
}  // namespace zeroth::kernels
