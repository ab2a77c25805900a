// The stage changes memory, never numbers, on ranks that are processes: zeroth-run starts one job, which runs rows of
// torch_parity_list.h over shared memory; in the long tier one a world, which runs the whole grid.
#include "parity/torch_parity_list.h"
#include "process/launcher/job.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

struct RankOutput {
  std::vector<std::string> references{};  ///< "<configuration>; <name> <bits>; ..."
  std::vector<std::string> different{};
  std::size_t compared = 0;
};

/// Lines "[rank] WORD rest" by rank; what is none of ours is left out.
std::map<int, RankOutput> by_rank(const std::string& out) {
  std::map<int, RankOutput> ranks;
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    char bracket = 0;
    int rank = -1;
    std::string word, rest;
    if (!(words >> bracket >> rank >> bracket >> word) || !std::getline(words >> std::ws, rest)) continue;
    if (word == "REFERENCE") ranks[rank].references.push_back(rest);
    if (word == "DIFFERENT") ranks[rank].different.push_back(rest);
    if (word == "COMPARED") ranks[rank].compared = std::stoul(rest);
  }
  return ranks;
}

/// The configuration and the first part in which two lines of it differ, "" if there is none.
std::string first_difference(const std::string& expected, const std::string& got) {
  std::istringstream one(expected), other(got);
  for (std::string a, b; std::getline(one, a, ';');) {
    std::getline(other, b, ';');
    if (a != b) return expected.substr(0, expected.find(';')) + ":" + a + " against" + b;
  }
  return "";
}

void expect_parity(int world, const std::vector<std::string>& arguments, const std::vector<ParityGroup>& groups) {
  Job job(Job::probe(world, arguments));
  const JobResult result = job.wait(std::chrono::minutes{4});
  std::map<int, RankOutput> ranks = by_rank(result.out);
  std::size_t variants = 0;
  for (const ParityGroup& group : groups) variants += group.variants.size();
  std::size_t compared = 0;
  for (const auto& [rank, output] : ranks) {
    compared += output.compared;
    if (!output.different.empty()) {
      ADD_FAILURE() << output.different.front() << "\nand " << output.different.size() - 1 << " more on rank " << rank;
    }
    const std::vector<std::string>& expected = ranks[0].references;
    for (std::size_t index = 0; index < std::min(expected.size(), output.references.size()); ++index) {
      EXPECT_EQ(first_difference(expected[index], output.references[index]), "")
          << "world " << world << ", rank 0 against rank " << rank;
    }
    EXPECT_EQ(output.references.size(), groups.size()) << "rank " << rank;
  }
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(ranks.size(), static_cast<std::size_t>(world)) << result.out;
  // Every rank all variants; the references against threads once.
  EXPECT_EQ(compared, static_cast<std::size_t>(world) * variants + groups.size());
}

TEST(TorchProcessRows, OneJobOfThreeRanksRunsTheRows) {
  expect_parity(3, {"rows"}, parity_rows({3}));
}

class TorchProcessParity : public ::testing::TestWithParam<int> {};

TEST_P(TorchProcessParity, OneJobRunsTheWholeGrid) {
  expect_parity(GetParam(), {}, parity_grid(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Long, TorchProcessParity, ::testing::Values(1, 2, 3, 4), ::testing::PrintToStringParamName());

}  // namespace
}  // namespace zeroth::test
