// The checks for what a job leaves behind can fail: here everything is left behind on purpose, and must be reported.
#include "support/left_behind.h"

#include "support/fork_ranks.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <functional>
#include <thread>

namespace zeroth::test {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr milliseconds kSoon{50};  ///< what was left on purpose does not go away

/// Descriptor of a listening abstract socket, named as those of the transport are.
int listen_as_zeroth(const std::string& job) {
  const std::string name = "zeroth-comm-" + std::to_string(::getuid()) + "-" + job;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof address.sun_path - 1));
  const int descriptor = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::bind(descriptor, reinterpret_cast<const sockaddr*>(&address), length) != 0 || ::listen(descriptor, 1) != 0)
    return -1;
  return descriptor;
}

/// Maps shared memory under a name of Zeroth; keeps the descriptor, too.
void hold_shared_memory() {
  const int descriptor = ::memfd_create("zeroth:left", MFD_CLOEXEC);
  if (::ftruncate(descriptor, 4096) != 0) ::_exit(3);
  if (::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0) == MAP_FAILED) ::_exit(3);
}

/// Pid of a process that does something and then stays until it is killed; its parent may have ended by then.
pid_t stay(const std::function<void()>& something, bool as_orphan) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return -1;
  const pid_t child = ::fork();
  if (child == 0) {
    const pid_t parent = ::getpid();
    if (as_orphan && ::fork() != 0) ::_exit(0);
    while (as_orphan && ::getppid() == parent) ::usleep(1'000);
    something();
    const pid_t own = ::getpid();
    if (::write(ends[1], &own, sizeof own) != sizeof own) ::_exit(3);
    for (;;) ::pause();
  }
  pid_t pid = -1;
  if (::read(ends[0], &pid, sizeof pid) != sizeof pid) pid = -1;
  ::close(ends[0]);
  ::close(ends[1]);
  if (as_orphan) ::waitpid(child, nullptr, 0);
  return pid;
}

/// Blocks until the main thread of a process is a zombie; gives up after 60 s.
void await_main_thread_ended(pid_t pid) {
  for (int looks = 0; looks < 60'000; ++looks) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string stat;
    std::getline(file, stat);
    if (stat.find(") Z ") != std::string::npos) return;
    std::this_thread::sleep_for(milliseconds{1});
  }
  FAIL() << "the main thread of " << pid << " did not end";
}

void end(pid_t pid) {
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
}

TEST(LeftBehind, ReportsAnOrphanWithItsSharedMemory) {
  const LeftBehind left;
  const pid_t orphan = stay(hold_shared_memory, /*as_orphan=*/true);
  const std::string who = "process " + std::to_string(orphan) + " ";
  EXPECT_THAT(left.text(kSoon), AllOf(HasSubstr(who), HasSubstr("mapping of /memfd:zeroth:left"),
                                      ContainsRegex(": descriptor [0-9]+ of /memfd:zeroth:left")));
  end(orphan);
  EXPECT_EQ(left.text(), "");
}

TEST(LeftBehind, ReportsAProcessThatBecomesAnotherProgramMeanwhile) {
  const LeftBehind left;
  const pid_t child = ::fork();
  for (int name = 0; child == 0; ++name) {
    ::prctl(PR_SET_NAME, std::to_string(name).c_str());
    ::usleep(1'000);
  }
  EXPECT_THAT(left.text(kSoon), HasSubstr("process " + std::to_string(child) + " ("));
  end(child);
}

/// A process that is being ended is a zombie as soon as its main thread has ended, while its other threads still are.
TEST(LeftBehind, ReportsAProcessOfWhichOneThreadIsLeft) {
  const LeftBehind left;
  const pid_t child = ::fork();
  if (child == 0) {
    (void)listen_as_zeroth("left4");
    hold_shared_memory();
    std::thread([] {
      for (;;) ::pause();
    }).detach();
    ::syscall(SYS_exit, 0);  // this thread alone
  }
  await_main_thread_ended(child);  // what it holds is there from the first look on
  const std::string who = "process " + std::to_string(child);
  EXPECT_THAT(left.text(kSoon),
              AllOf(HasSubstr(who + " "), HasSubstr("-left4 "), HasSubstr(who + ": mapping of /memfd:zeroth:left"),
                    ContainsRegex(who + ": descriptor [0-9]+ of /memfd:zeroth:left")));
  end(child);
  EXPECT_EQ(left.text(), "");
}

/// As where the machine stands still for longer than the patience.
TEST(LeftBehind, LooksMoreThanOnceWithoutPatience) {
  const LeftBehind left;
  std::thread passing([] { std::this_thread::sleep_for(milliseconds{20}); });
  EXPECT_EQ(left.text(milliseconds{0}), "");
  passing.join();
}

TEST(LeftBehind, ReportsADescendantOfAnyDepth) {
  const LeftBehind left;
  pid_t* shared =
      static_cast<pid_t*>(::mmap(nullptr, sizeof(pid_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const pid_t child = stay([shared] { *shared = stay([] {}, /*as_orphan=*/false); }, /*as_orphan=*/false);
  EXPECT_THAT(left.text(kSoon), HasSubstr("process " + std::to_string(*shared) + " "));
  end(child);
  end(*shared);  // adopted
  ::munmap(shared, sizeof(pid_t));
  EXPECT_EQ(left.text(), "");
}

TEST(LeftBehind, ReportsAListeningSocketInTheTest) {
  const LeftBehind left;
  const int descriptor = listen_as_zeroth("left1");
  EXPECT_THAT(left.text(kSoon),
              AllOf(HasSubstr("socket @zeroth-comm-"), HasSubstr("-left1 "), HasSubstr("descriptor ")));
  ::close(descriptor);
  EXPECT_EQ(left.text(), "");
}

TEST(LeftBehind, ReportsAListeningSocketOfAnOrphan) {
  const LeftBehind left;
  const pid_t orphan = stay([] { (void)listen_as_zeroth("left2"); }, /*as_orphan=*/true);
  EXPECT_THAT(left.text(kSoon), AllOf(HasSubstr("socket @zeroth-comm-"), HasSubstr("-left2 ")));
  end(orphan);
  EXPECT_EQ(left.text(), "");
}

TEST(LeftBehind, ReportsFilesInTheFolderForTemporaryFiles) {
  const LeftBehind left;
  const std::string path = std::filesystem::temp_directory_path() / "forgotten";
  EXPECT_EQ(std::filesystem::path(path).parent_path(), left.folder());
  std::ofstream(path) << "text";
  EXPECT_THAT(left.text(kSoon), HasSubstr("file " + path));
  ::unlink(path.c_str());
  EXPECT_EQ(left.text(), "");
}

TEST(LeftBehind, ReportsFilesInSharedMemory) {
  const LeftBehind left;
  const std::string name = "/zeroth-left-" + std::to_string(::getpid());
  const int descriptor = ::shm_open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  ASSERT_GE(descriptor, 0);
  ::close(descriptor);
  EXPECT_THAT(left.text(kSoon), HasSubstr("file /dev/shm" + name));
  ::shm_unlink(name.c_str());
  EXPECT_EQ(left.text(), "");
}

TEST(LeftBehind, WaitsForWhatIsGoingAway) {
  const LeftBehind left;
  std::thread passing([] { std::this_thread::sleep_for(milliseconds{60}); });
  EXPECT_EQ(left.text(), "");
  passing.join();
}

TEST(LeftBehind, DoesNotSeeWhatBelongsToATestBesideIt) {
  // Rank 0 looks; rank 1 is the neighbour: it has a child with memory, and opens a socket after the other's beginning.
  auto* moves = static_cast<std::atomic<int>*>(
      ::mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const auto wait_for = [moves](int move) {
    while (*moves < move) std::this_thread::sleep_for(milliseconds{1});
  };
  const auto look = [&] {
    const std::set<std::string> before = holdings();
    const LeftBehind left;
    *moves = 1;
    wait_for(2);
    const std::string text = left.text(kSoon);
    *moves = 3;
    require(text.empty(), text);
    require(holdings() == before, "the check itself holds something");
  };
  const auto be_there = [&] {
    wait_for(1);
    const LeftBehind left;
    const pid_t child = stay(hold_shared_memory, /*as_orphan=*/false);
    const int descriptor = listen_as_zeroth("neighbour");
    *moves = 2;
    wait_for(3);
    const std::string text = left.text(kSoon);
    require(text.find("process " + std::to_string(child) + " ") != std::string::npos, text);
    require(text.find("-neighbour ") != std::string::npos, text);
    ::close(descriptor);
    end(child);
  };
  const ForkReport report = fork_ranks(2, [&](int rank) { rank == 0 ? look() : be_there(); });
  EXPECT_TRUE(report.ok()) << report.text();
  ::munmap(moves, sizeof(std::atomic<int>));
}

/// So that no test with ranks can forget to look.
TEST(ForkRanks, FailTheTestWhereTheyLeaveSomething) {
  auto* orphan =
      static_cast<pid_t*>(::mmap(nullptr, sizeof(pid_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const std::string name = "/zeroth-left-" + std::to_string(::getpid());
  ::testing::TestPartResultArray failures;
  {
    const ::testing::ScopedFakeTestPartResultReporter instead(&failures);
    const ForkReport report = fork_ranks(1, [&](int) {
      *orphan = stay([] { (void)listen_as_zeroth("left3"); }, /*as_orphan=*/true);
      ::close(::shm_open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
      std::ofstream(std::filesystem::temp_directory_path() / "forgotten") << "text";
    });
    EXPECT_TRUE(report.ok()) << report.text();
  }
  end(*orphan);
  ::shm_unlink(name.c_str());
  ASSERT_EQ(failures.size(), 1);
  EXPECT_THAT(failures.GetTestPartResult(0).message(),
              AllOf(HasSubstr("process " + std::to_string(*orphan) + " "), HasSubstr("-left3 "),
                    HasSubstr("file /dev/shm" + name), HasSubstr("/forgotten")));
  ::munmap(orphan, sizeof(pid_t));
}

TEST(ForkRanks, DoNotFailTheTestForWhatEndsWithThem) {
  EXPECT_TRUE(fork_ranks(2, [](int) { hold_shared_memory(); }).ok());
}

TEST(Holdings, ReportDescriptorsMemoryAndThreadsUntilTheyAreGivenBack) {
  const std::set<std::string> before = holdings();
  EXPECT_EQ(still_held(before), "");
  const int descriptor = ::memfd_create("zeroth:left", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(descriptor, 4096), 0);
  void* memory = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, descriptor, 0);
  EXPECT_THAT(still_held(before, kSoon), AllOf(HasSubstr("descriptor "), HasSubstr("mapping of /memfd:zeroth:left")));
  ::close(descriptor);
  EXPECT_THAT(still_held(before, kSoon),
              AllOf(Not(HasSubstr("descriptor ")), HasSubstr("mapping of /memfd:zeroth:left")));
  ::munmap(memory, 4096);
  EXPECT_EQ(still_held(before), "");
  std::thread thread([] { std::this_thread::sleep_for(milliseconds{500}); });
  EXPECT_THAT(still_held(before, kSoon), HasSubstr("thread "));
  thread.join();
  EXPECT_EQ(still_held(before), "");
}

}  // namespace
}  // namespace zeroth::test
