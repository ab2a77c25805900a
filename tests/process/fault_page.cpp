#include "process/fault_page.h"

#include <regex>
#include <sstream>

namespace zeroth::test {
namespace {

constexpr std::string_view kHead = R"(# What the ranks say of a fault

This page is written by `faults_test` (`tests/process/faults_test.cpp`), which makes each of these faults on one rank of
four and holds every other rank to an error in less than 15 s, in less than 2 s where a rank ends or a connection does,
that names the guilty rank, the call, and the unit or parameter:
`ZEROTH_WRITE_FAULTS=docs/faults.md build/core/tests/process/faults_test`. A test compares the two.

Ranks are processes on one host; each trains a small model with ZeRO stage 3 (units `root`, `blocks.0` to `blocks.2`)
and makes two sums of its own a step, "the loss metrics" and "the token counts". Timeouts are 3 s where a rank hangs,
and `zeroth.frozen_after_ms` is 2 s.

- The fault comes in step 4, where it is not one of the construction.
- The line is that of the lowest other rank; all others say the same, or the same as they see it.
- s: seconds from the fault to the end of the last other rank; from the start of the job where the fault has no moment
  of its own.
- Process ids, hosts, names of jobs and times inside a line are replaced.

| fault | over | what the other ranks say | s |
|---|---|---|---|
)";

std::string replaced(const std::string& text, const char* pattern, const char* with) {
  return std::regex_replace(text, std::regex(pattern), with);
}

}  // namespace

std::string without_accidents(std::string said) {
  said = replaced(said, R"(\(pid \d+ on [^)]+\))", "(pid 4711 on h1)");
  said = replaced(said, R"(\(pid \d+\))", "(pid 4711)");
  said = replaced(said, R"((ended|for) \d+\.\d s( ago)?)", "$1 1.0 s$2");
  said = replaced(said, "job test-[0-9-]+", "job NAME");
  said = replaced(said, R"(\.cpp:\d+)", ".cpp");
  return replaced(said, R"(\|)", "/");
}

std::string fault_page(const std::vector<FaultRow>& rows) {
  std::ostringstream page;
  page << kHead;
  for (const FaultRow& row : rows)
    page << "| " << row.fault << " | " << row.over << " | " << row.said << " | " << row.seconds << " |\n";
  return page.str();
}

std::vector<FaultRow> rows_of_page(std::string_view page) {
  std::vector<FaultRow> rows;
  if (!page.starts_with(kHead)) return rows;
  std::istringstream lines{std::string(page.substr(kHead.size()))};
  for (std::string line; std::getline(lines, line);) {
    static const std::regex kRow(R"(\| (.*) \| (.*) \| (.*) \| (.*) \|)");
    std::smatch found;
    if (!std::regex_match(line, found, kRow)) return {};
    rows.push_back({found[1], found[2], found[3], found[4]});
  }
  return rows;
}

}  // namespace zeroth::test
