#include <kernels/common/dispatch.h>
#include <zeroth/base/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

TEST(Dispatch, RefusesASetThatDoesNotExist) {
  const auto newer = static_cast<Isa>(7);
  EXPECT_FALSE(is_supported(newer));
  EXPECT_THROW(detail::require_supported(newer, "adamw"), Error);
  EXPECT_NO_THROW(detail::require_supported(best_isa(), "adamw"));
}

}  // namespace
}  // namespace zeroth::kernels
