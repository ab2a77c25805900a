// Short ways to read a configuration in a test and to look at what was wrong with it.
#pragma once

#include <zeroth/engine/config.h>

#include <gtest/gtest.h>

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::test {

inline Config read(std::string_view text, std::span<const ConfigOverride> overrides = {}) {
  return Config::from_json_text(text, "test.json", overrides);
}

/// What is wrong with a text; empty if nothing is.
inline std::vector<ConfigProblem> problems_of(std::string_view text, std::span<const ConfigOverride> overrides = {}) {
  try {
    static_cast<void>(read(text, overrides));
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.code(), ErrorCode::kConfig);
    EXPECT_FALSE(error.problems().empty());
    return error.problems();
  }
  return {};
}

/// The only problem of a text; a failure if there is none or more than one.
inline ConfigProblem problem_of(std::string_view text, std::span<const ConfigOverride> overrides = {}) {
  const std::vector<ConfigProblem> problems = problems_of(text, overrides);
  EXPECT_EQ(problems.size(), 1U) << text;
  for (const ConfigProblem& problem : problems) EXPECT_FALSE(problem.origin.empty()) << problem.text();
  return problems.empty() ? ConfigProblem{} : problems.front();
}

/// {"a": {"b": <json>}} for "/a/b".
inline std::string document_with(std::string_view pointer, std::string_view json) {
  std::string head;
  std::string tail;
  for (std::size_t at = 0; at < pointer.size();) {
    const std::size_t end = std::min(pointer.find('/', at + 1), pointer.size());
    head += "{\"" + std::string(pointer.substr(at + 1, end - at - 1)) + "\": ";
    tail += "}";
    at = end;
  }
  return head + std::string(json) + tail;
}

}  // namespace zeroth::test
