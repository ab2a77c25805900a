// docs/errors/<SLUG>.md: one page a code, each with the same four parts and a message that looks like the
// real ones.
#include "error_codes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace zeroth {
namespace {

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

TEST(ErrorPages, EverySlugHasAPageWithAllParts) {
  for (const auto& facts : testing::kCodes) {
    const std::filesystem::path path =
        std::filesystem::path(ZEROTH_ERROR_PAGES) / (std::string(facts.slug) + ".md");
    ASSERT_TRUE(std::filesystem::is_regular_file(path)) << path;
    const std::string text = read(path);
    EXPECT_TRUE(text.starts_with("# " + std::string(facts.slug) + "\n")) << path;
    EXPECT_NE(text.find("exit code " + std::to_string(facts.exit_code)), std::string::npos) << path;
    EXPECT_NE(text.find("[" + std::string(facts.slug) + "] "), std::string::npos) << path << ": no example";
    for (const char* part : {"## For example", "## Causes", "## What to do"}) {
      EXPECT_NE(text.find(part), std::string::npos) << path << ": " << part;
    }
    const auto lines = std::count(text.begin(), text.end(), '\n');
    EXPECT_GE(lines, 15) << path;
    EXPECT_LE(lines, 40) << path;
  }
}

TEST(ErrorPages, NoPageIsOfAnUnknownSlug) {
  for (const auto& entry : std::filesystem::directory_iterator(ZEROTH_ERROR_PAGES)) {
    const std::string stem = entry.path().stem().string();
    const bool known = stem == "README" || std::ranges::any_of(testing::kCodes, [&](const auto& facts) {
                         return facts.slug == stem;
                       });
    EXPECT_TRUE(known) << entry.path();
  }
}

TEST(ErrorPages, TheIndexLinksEveryPage) {
  const std::string index = read(std::filesystem::path(ZEROTH_ERROR_PAGES) / "README.md");
  for (const auto& facts : testing::kCodes) {
    EXPECT_NE(index.find("(" + std::string(facts.slug) + ".md)"), std::string::npos) << facts.slug;
  }
}

}  // namespace
}  // namespace zeroth
