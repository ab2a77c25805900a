#include "doctor/facts.h"

#include <zeroth/base/version.h>

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>

namespace zeroth::doctor {
namespace {

TEST(Facts, AreThoseOfThisHost) {
  const RankFacts facts = facts_of_this_process();
  EXPECT_EQ(facts.zeroth, version_text());
  EXPECT_NE(facts.kernel, "");
  EXPECT_NE(facts.glibc, "");
  EXPECT_GE(facts.processors, facts.cores);
  EXPECT_GE(facts.cores, facts.numa_nodes);
  EXPECT_GE(facts.numa_nodes, 1);
  EXPECT_GT(facts.memory, facts.memory_available / 2);
  EXPECT_EQ(facts.memfd, "");
  EXPECT_EQ(facts.pidfd, "");
}

TEST(Facts, ALibraryThatCrashesOrHangsCostsOnlyItsAnswer) {
  EXPECT_EQ(ask_in_child([] { return std::string("4.1"); }, Milliseconds{10'000}), "4.1");
  EXPECT_EQ(ask_in_child([]() -> std::string { std::abort(); }, Milliseconds{10'000}), "");
  const auto begin = SteadyClock::now();
  EXPECT_EQ(ask_in_child(
                []() -> std::string {
                  std::this_thread::sleep_for(std::chrono::seconds(60));
                  return "late";
                },
                Milliseconds{200}),
            "");
  EXPECT_LT(SteadyClock::now() - begin, std::chrono::seconds(30));
  EXPECT_EQ(ask_in_child([] { return std::string(100'000, 'x'); }, Milliseconds{10'000}).size(), 4096U);
}

TEST(Facts, ADiskIsMeasuredAndNothingIsLeft) {
  const std::string folder = ::testing::TempDir() + "/zeroth-doctor-disk-test";
  std::filesystem::create_directories(folder);
  const DiskFacts disk = measure_disk(folder, std::size_t{5} << 20U, Milliseconds{20'000});
  EXPECT_EQ(disk.error, "");
  EXPECT_GT(disk.write_bytes_per_s, 0);
  EXPECT_GT(disk.read_bytes_per_s, 0);
  EXPECT_GT(disk.free, 0U);
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove(folder);
  EXPECT_NE(measure_disk(folder, 4096, Milliseconds{1000}).error, "");
  EXPECT_NE(measure_disk("/proc", 4096, Milliseconds{1000}).error, "");
}

TEST(Facts, NamesThatLeadToLoopbackAreTold) {
  EXPECT_EQ(loopback_of("127.0.1.1"), "127.0.1.1");
  EXPECT_EQ(loopback_of("::1"), "::1");
  EXPECT_EQ(loopback_of("10.0.0.1"), "");
  EXPECT_EQ(loopback_of(""), "");
  EXPECT_EQ(loopback_of("no such name"), "");
}

}  // namespace
}  // namespace zeroth::doctor
