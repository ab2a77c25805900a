#include <zeroth/base/secret.h>

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <span>
#include <string_view>

namespace zeroth {
namespace {

bool same(std::string_view a, std::string_view b) {
  return same_secret(std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

TEST(SameSecret, LooksAtEveryByteAndAtTheLength) {
  EXPECT_TRUE(same("", ""));
  EXPECT_TRUE(same("sixteen letters.", "sixteen letters."));
  EXPECT_FALSE(same("sixteen letters.", "Sixteen letters."));
  EXPECT_FALSE(same("sixteen letters.", "sixteen letters!"));
  EXPECT_FALSE(same("sixteen letters.", "sixteen letters"));
  EXPECT_FALSE(same("", "a"));
}

TEST(FillRandom, DrawsOthersEachTime) {
  std::array<std::byte, 32> first{};
  std::array<std::byte, 32> second{};
  fill_random(first, "a test");
  fill_random(second, "a test");
  EXPECT_NE(first, second);  // the same once in 2^256 draws
  EXPECT_FALSE(same_secret(first, second));
}

}  // namespace
}  // namespace zeroth
