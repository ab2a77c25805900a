#include "libtorch/version_check.h"

#include <zeroth/base/error.h>

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace zeroth::libtorch {
namespace {

TEST(VersionCheck, SameOrUnknownVersionsPass) {
  EXPECT_NO_THROW(compare_torch_versions("2.11.0", "2.11.0", "/torch"));
  EXPECT_NO_THROW(compare_torch_versions("2.11.0", "", "/torch"));
}

TEST(VersionCheck, AnotherVersionIsAnErrorThatNamesBoth) {
  for (const char* loaded : {"2.11.1", "2.10.0", "2.1", "3.0.0", "2.11.0.1"}) {
    try {
      compare_torch_versions("2.11.0", loaded, "/opt/torch");
      FAIL() << loaded;
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_EQ(error.code(), ErrorCode::kEnvironment);
      EXPECT_NE(text.find("torch 2.11.0"), std::string::npos) << text;
      EXPECT_NE(text.find("torch " + std::string(loaded)), std::string::npos) << text;
      EXPECT_NE(text.find("/opt/torch"), std::string::npos) << text;
    }
  }
}

class InstalledVersion : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "zeroth-version-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void write(const std::string& name, const std::string& text) const { std::ofstream(folder_ / name) << text; }

  std::filesystem::path folder_;
};

TEST_F(InstalledVersion, OfAWheel) {
  write("version.py",
        "from typing import Optional\n__all__ = ['__version__']\n__version__ = '2.11.0+cu130'\ndebug = "
        "False\n");
  EXPECT_EQ(installed_torch_version(folder_.string()), "2.11.0");
}

TEST_F(InstalledVersion, OfAnArchive) {
  write("build-version", "2.9.1+cpu\n");
  EXPECT_EQ(installed_torch_version(folder_.string()), "2.9.1");
}

TEST_F(InstalledVersion, OfNothingThatSaysIt) {
  EXPECT_EQ(installed_torch_version(folder_.string()), "");
  write("version.py", "__version__ = broken\n");
  EXPECT_EQ(installed_torch_version(folder_.string()), "");
}

TEST(VersionCheck, TheLoadedTorchIsTheOneOfTheBuild) {
  EXPECT_NO_THROW(require_same_torch());
}

}  // namespace
}  // namespace zeroth::libtorch
