#include "launcher/oom.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace zeroth::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(OutOfMemory, TheFileIsThatOfTheMemoryCgroup) {
  EXPECT_THAT(oom_files("0::/user.slice/job_1\n"),
              ElementsAre("/sys/fs/cgroup/user.slice/job_1/memory.events", "/sys/fs/cgroup/memory.events"));
  EXPECT_THAT(oom_files("9:name=systemd:/x\n4:memory:/slurm/job_1\n0::/\n"),
              ElementsAre("/sys/fs/cgroup/memory/slurm/job_1/memory.oom_control",
                          "/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events"));
  EXPECT_THAT(oom_files("3:cpu,memory:/\n"), ElementsAre("/sys/fs/cgroup/memory/memory.oom_control"));
  for (const char* none : {"", "\n", "4", "4:memory", "1:memoryless:/x\n"})
    EXPECT_THAT(oom_files(none), IsEmpty()) << none;
}

TEST(OutOfMemory, TheCountIsItsLine) {
  EXPECT_EQ(oom_kills_in("low 0\nhigh 0\nmax 7\noom 2\noom_kill 3\noom_group_kill 9\n"), 3);
  EXPECT_EQ(oom_kills_in("oom_kill_disable 1\nunder_oom 0\noom_kill 0\n"), 0);
  for (const char* none : {"", "oom_kill\n", "oom_kill x\n", "oom_kill_disable 1\n", "oom 2\n"})
    EXPECT_EQ(oom_kills_in(none), std::nullopt) << none;
}

}  // namespace
}  // namespace zeroth::launcher
