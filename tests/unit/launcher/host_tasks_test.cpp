// How ranks, devices and variables are shared out over hosts.
#include "launcher/host_tasks.h"

#include <zeroth/base/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace zeroth::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(HostTasks, TheFirstSlotsAreTaken) {
  Options options;
  options.hosts = "a:2,b:2,c:2";
  options.num_ranks = 3;
  const std::vector<HostSelection> expected{{"a", {0, 1}}, {"b", {0}}};
  EXPECT_EQ(hosts_of(options), expected);
  options.num_ranks = 7;
  EXPECT_THROW((void)hosts_of(options), Error);
  options.hosts = "a:1024,b:1024,c:1024,d:1024,e:1024";
  options.num_ranks = 0;
  EXPECT_THROW((void)hosts_of(options), Error);
}

TEST(HostTasks, SoManyOfEachHost) {
  Options options;
  options.hosts = "a:4,b:2";
  options.ranks_per_host = 2;
  const std::vector<HostSelection> expected{{"a", {0, 1}}, {"b", {0, 1}}};
  EXPECT_EQ(hosts_of(options), expected);
  EXPECT_EQ(describe_hosts(options, expected), "2 hosts x 2 ranks = 4 (--hosts)");
  options.ranks_per_host = 3;
  try {
    (void)hosts_of(options);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_THAT(error.what(),
                HasSubstr("which: host b; expected: at least 3 slots; got: 2; hint: give it more (slots=3"));
  }
}

TEST(HostTasks, RanksAreNumberedInTheOrderOfTheHosts) {
  const auto tasks = share_out({}, {{"a", {0, 1}}, {"b", {0}}, {"c", {0, 1, 2}}}, {.num_ranks = 6}, {});
  ASSERT_EQ(tasks.size(), 3U);
  EXPECT_EQ(tasks[2].node, 2);
  EXPECT_EQ(tasks[2].first_rank, 3);
  EXPECT_EQ(tasks[2].num_ranks, 3);
}

std::vector<std::pair<std::string, std::string>> extra_of(const HostSelection& host,
                                                          const std::vector<std::string>& environment) {
  return share_out({}, {host}, {.num_ranks = 8}, environment).front().extra;
}

TEST(HostTasks, DevicesAreAsGivenUnlessTheFilterNamesSlots) {
  using Pair = std::pair<std::string, std::string>;
  EXPECT_TRUE(extra_of({"a", {0, 1}}, {"CUDA_VISIBLE_DEVICES=3,5"}).empty());
  EXPECT_TRUE(extra_of({"a", {0, 1}}, {}).empty());
  EXPECT_THAT(extra_of({"a", {0, 2}, true}, {}), ElementsAre(Pair{"CUDA_VISIBLE_DEVICES", "0,2"}));
  EXPECT_THAT(extra_of({"a", {0, 2}, true}, {"CUDA_VISIBLE_DEVICES=3,5,GPU-x"}),
              ElementsAre(Pair{"CUDA_VISIBLE_DEVICES", "3,GPU-x"}));
  try {
    (void)extra_of({"a", {2}, true}, {"CUDA_VISIBLE_DEVICES=3,5"});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("slot 2 of host a; expected: below 2"));
  }
}

TEST(HostTasks, AllVariablesAreCarriedButThoseOfAHost) {
  std::vector<std::string> left_out;
  const auto kept = carried({"A=1", "SSH_AUTH_SOCK=x", "PATH=p", "_=z", "BASH_FUNC_f%%=() {", "PWD=/", "E="}, left_out);
  EXPECT_THAT(kept, ElementsAre("A=1", "PATH=p", "E="));
  EXPECT_THAT(left_out, ElementsAre("BASH_FUNC_f%%", "PWD", "SSH_AUTH_SOCK", "_"));
  HostTask task{.environment = kept, .directory = "/there"};
  complete_environment(task, {"A=2", "SSH_AUTH_SOCK=y", "PWD=/root", "ZEROTH_RDZV_SECRET=s"});
  EXPECT_THAT(task.environment, ElementsAre("A=1", "PATH=p", "E=", "SSH_AUTH_SOCK=y", "PWD=/there"));
}

}  // namespace
}  // namespace zeroth::launcher
