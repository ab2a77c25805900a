#include "device/proc.h"

#include <zeroth/device/memory.h>

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

namespace zeroth {
namespace {

TEST(AvailableMemory, IsMoreThanNothingAndLessThanTheMachine) {
  const std::uint64_t available = available_memory_bytes();
  EXPECT_GT(available, std::uint64_t{1} << 20U);
  const auto physical =
      static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  EXPECT_LE(available, physical);
}

TEST(Pss, OwnIsPositiveAndStrangersAreZero) {
  EXPECT_GT(pss_bytes(), kPageBytes);
  EXPECT_GT(pss_bytes(::getpid()), kPageBytes);
  EXPECT_EQ(pss_bytes(1 << 30), 0U);
}

TEST(Pss, GrowsWithWhatIsTouched) {
  const Arena arena = Arena::create(ArenaKind::kShared, 32U << 20U, "pss");
  const std::uint64_t before = pss_bytes();
  std::memset(arena.data(), 1, arena.capacity());
  EXPECT_GT(pss_bytes(), before + (24U << 20U));
}

/// A made-up /sys/fs/cgroup; removed at the end.
class Cgroups : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "zeroth-cgroup-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  [[nodiscard]] std::optional<std::uint64_t> left(const std::string& own) const {
    write("own", own);
    return cgroup_left_bytes(root_.string(), (root_ / "own").string());
  }

  std::filesystem::path root_;
};

TEST_F(Cgroups, WithoutAnyThereIsNoLimit) {
  EXPECT_EQ(left(""), std::nullopt);
  EXPECT_EQ(left("0::/\n"), std::nullopt);
  EXPECT_EQ(left("nonsense\n:::\n0::no-slash\n"), std::nullopt);
}

TEST_F(Cgroups, V2AtTheRootOfAContainer) {
  write("memory.max", "1000000\n");
  write("memory.current", "300000\n");
  EXPECT_EQ(left("0::/\n"), 700000U);
}

TEST_F(Cgroups, MaxMeansNoLimit) {
  write("memory.max", "max\n");
  write("memory.current", "300000\n");
  EXPECT_EQ(left("0::/\n"), std::nullopt);
}

TEST_F(Cgroups, PageCacheCountsAsFree) {
  write("memory.max", "1000000");
  write("memory.current", "900000");
  write("memory.stat", "anon 100000\nfile 700000\ninactive_file 500000\nactive_file 200000\nshmem 0\n");
  EXPECT_EQ(left("0::/\n"), 800000U);
}

TEST_F(Cgroups, MoreThanTheLimitLeavesNothing) {
  write("memory.max", "1000");
  write("memory.current", "5000");
  EXPECT_EQ(left("0::/\n"), 0U);
  write("memory.stat", "inactive_file 999999\n");
  EXPECT_EQ(left("0::/\n"), 1000U);
}

TEST_F(Cgroups, TheTightestLevelDecides) {
  write("slurm/memory.max", "5000");
  write("slurm/memory.current", "1000");
  write("slurm/job/memory.max", "3000");
  write("slurm/job/memory.current", "500");
  write("slurm/job/step/memory.max", "max");
  write("slurm/job/step/memory.current", "500");
  EXPECT_EQ(left("0::/slurm/job/step\n"), 2500U);
  EXPECT_EQ(left("0::/slurm\n"), 4000U);
  EXPECT_EQ(left("0::/elsewhere\n"), std::nullopt);
}

TEST_F(Cgroups, V1WithItsSumsOverSubgroups) {
  write("memory/docker/x/memory.limit_in_bytes", "8000");
  write("memory/docker/x/memory.usage_in_bytes", "6000");
  write("memory/docker/x/memory.stat", "inactive_file 10\ntotal_inactive_file 1500\ntotal_active_file 500\n");
  write("memory/memory.limit_in_bytes", "9223372036854771712");
  write("memory/memory.usage_in_bytes", "7000");
  const std::string own = "9:name=systemd:/\n5:devices:/\n4:memory:/docker/x\n1:cpu,cpuacct:/\n0::/\n";
  EXPECT_EQ(left(own), 4000U);
}

TEST_F(Cgroups, APathOfAnotherNamespaceFallsBackToTheRoot) {
  write("memory/memory.limit_in_bytes", "8000");
  write("memory/memory.usage_in_bytes", "1000");
  EXPECT_EQ(left("4:cpu,memory:/docker/not/mounted/here\n"), 7000U);
}

}  // namespace
}  // namespace zeroth
