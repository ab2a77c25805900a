// docs/errors/<SLUG>.md: one page a code, each with the same four parts and a message that looks like the
// real ones; and a test a code that provokes it.
#include "error_codes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

namespace zeroth {
namespace {

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// White space does not count: where a formatter or a writer of prose breaks a line is nobody's business.
std::string without_space(std::string text) {
  std::erase_if(text, [](unsigned char c) { return std::isspace(c) != 0; });
  return text;
}

bool holds(const std::string& text, const std::string& part) {
  return without_space(text).find(without_space(part)) != std::string::npos;
}

TEST(ErrorPages, EverySlugHasAPageWithAllParts) {
  for (const auto& facts : test::kCodes) {
    const std::filesystem::path path = std::filesystem::path(ZEROTH_ERROR_PAGES) / (std::string(facts.slug) + ".md");
    ASSERT_TRUE(std::filesystem::is_regular_file(path)) << path;
    const std::string text = read(path);
    EXPECT_TRUE(text.starts_with("# " + std::string(facts.slug) + "\n")) << path;
    EXPECT_TRUE(holds(text, "exit code " + std::to_string(facts.exit_code))) << path;
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
    const bool known =
        stem == "README" || std::ranges::any_of(test::kCodes, [&](const auto& facts) { return facts.slug == stem; });
    EXPECT_TRUE(known) << entry.path();
  }
}

TEST(ErrorPages, TheIndexLinksEveryPage) {
  const std::string index = read(std::filesystem::path(ZEROTH_ERROR_PAGES) / "README.md");
  for (const auto& facts : test::kCodes) {
    EXPECT_NE(index.find("(" + std::string(facts.slug) + ".md)"), std::string::npos) << facts.slug;
  }
}

/// A test that brings about a failure of the code and looks at what is said of it: a file, and what of that test stands
/// there.
struct Provoking {
  std::string_view slug;
  const char* file;
  const char* text;
};
constexpr Provoking kProvoking[] = {
    {"USAGE", "process/fault_cases.cpp", R"(cases.add("SkipsBackward")"},
    {"CONFIG", "python/options_test.py", R"(caught.exception.exit_code), ("CONFIG", 78))"},
    {"MODEL", "python/refusals_test.py", R"(\[MODEL\] a parameter was replaced or removed)"},
    {"MISMATCH", "process/fault_cases.cpp", R"(cases.add("SwapsSums")"},
    {"PEER_LOST", "process/fault_cases.cpp", R"(cases.add("KilledInForward")"},
    {"TIMEOUT", "process/fault_cases.cpp", R"(cases.add("SpinsInForward")"},
    {"NONFINITE", "process/fault_cases.cpp", R"(poisoned("NanAlways")"},
    {"OUT_OF_MEMORY", "process/fault_cases.cpp", R"(tampered("NoRoom")"},
    {"CHECKPOINT", "parity/toy_checkpoint_test.cpp", "ErrorCode::kCheckpoint"},
    {"RESOURCE", "process/fault_cases.cpp", R"(cases.add("NoMemfd")"},
    {"IO", "process/launcher/restart_test.cpp", "[IO] cannot write the status file: "},
    {"LAUNCH", "process/launcher/nodes_test.py", "[LAUNCH] nodes 1, 3 did not come within 6 s"},
    {"ENVIRONMENT", "process/launcher/command_line_test.cpp", R"({"[ENVIRONMENT]", "/tmp: Is a directory"})"},
    {"ABORTED", "process/fault_cases.cpp", R"(cases.add("Aborts")"},
    {"USER", "process/fault_cases.cpp", R"(cases.add("Throws")"},
    {"INTERNAL", "process/failpoints_test.cpp", "failure->code == ErrorCode::kInternal"},
};

TEST(ErrorPages, ATestProvokesEveryCode) {
  const std::filesystem::path tests = std::filesystem::path(ZEROTH_SOURCE_FOLDER) / "tests";
  for (const auto& facts : test::kCodes) {
    const auto* const found = std::ranges::find(kProvoking, facts.slug, &Provoking::slug);
    ASSERT_NE(found, std::end(kProvoking)) << facts.slug << ": name the test that provokes it";
    EXPECT_TRUE(holds(read(tests / found->file), found->text))
        << facts.slug << ": not in " << found->file << ": " << found->text;
  }
}

}  // namespace
}  // namespace zeroth
