// docs/faults.md: what the ranks say of each fault, as a run of faults_test has heard it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace zeroth::test {

struct FaultRow {
  std::string fault{};  ///< "rank 2 is killed in the forward of blocks.1"
  std::string over{};   ///< "shared memory", "messages"
  std::string said{};   ///< by the lowest of the other ranks; "goes on", with a warning if there is one
  std::string seconds{};
};

/// Without what differs from run to run: process ids, hosts, ages, names of jobs, lines of our sources.
[[nodiscard]] std::string without_accidents(std::string said);

[[nodiscard]] std::string fault_page(const std::vector<FaultRow>& rows);
/// The rows of a page.
[[nodiscard]] std::vector<FaultRow> rows_of_page(std::string_view page);

}  // namespace zeroth::test
