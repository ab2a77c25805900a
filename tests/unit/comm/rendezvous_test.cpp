#include "comm/rendezvous/rendezvous.h"

#include "comm/rendezvous/unix_socket.h"
#include "support/fork_ranks.h"
#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/comm/factory.h>

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace zeroth {
namespace {

using test::fork_ranks;
using test::ForkReport;
using test::quick_options;
using test::unique_job;

#define ZR_SKIP_UNDER_TSAN() \
  if (kThreadSanitizer) GTEST_SKIP() << "not under sanitizers: forked ranks"

void expect_all(const ForkReport& report, std::size_t failures, ErrorCode code, const std::vector<std::string>& texts) {
  EXPECT_EQ(report.failures.size(), failures) << report.text();
  for (const test::RankFailure& failure : report.failures) {
    EXPECT_EQ(failure.code, code) << failure.text;
    for (const std::string& text : texts) EXPECT_NE(failure.text.find(text), std::string::npos) << failure.text;
  }
}

void join_world(const std::string& job, int rank, int size, CommOptions options = quick_options()) {
  const std::shared_ptr<CommBackend> backend =
      make_backend("shm", {.rank = rank, .size = size, .job = job, .hub = nullptr, .options = std::move(options)});
  Communicator(backend).barrier();
}

TEST(Rendezvous, ALateRankIsAwaited) {
  ZR_SKIP_UNDER_TSAN();
  for (const int late : {0, 2}) {
    const std::string job = unique_job();
    const ForkReport report = fork_ranks(3, [&](int rank) {
      if (rank == late) std::this_thread::sleep_for(Milliseconds{300});
      join_world(job, rank, 3);
    });
    EXPECT_TRUE(report.ok()) << report.text();
  }
}

TEST(Rendezvous, WorldSizesThatDifferAreToldToAll) {
  ZR_SKIP_UNDER_TSAN();
  const std::string job = unique_job();
  const ForkReport report = fork_ranks(2, [&](int rank) { join_world(job, rank, rank == 0 ? 2 : 3); });
  expect_all(report, 2, ErrorCode::kMismatch, {"rank 1", "3 ranks", "says 2"});
}

TEST(Rendezvous, ARankThatComesTwiceIsToldToAll) {
  ZR_SKIP_UNDER_TSAN();
  const std::string job = unique_job();
  const ForkReport report = fork_ranks(3, [&](int process) { join_world(job, process == 2 ? 1 : process, 4); });
  expect_all(report, 3, ErrorCode::kMismatch, {"rank 1 came twice", "pid "});
}

TEST(Rendezvous, TwoHostsAreAnError) {
  ZR_SKIP_UNDER_TSAN();
  const std::string job = unique_job();
  CommOptions options;
  options.timeout = Milliseconds{1500};
  const ForkReport report = fork_ranks(2, [&](int) { join_world(job, 0, 2, options); });
  ASSERT_EQ(report.failures.size(), 2U) << report.text();
  EXPECT_NE(report.text().find("somebody already is rank 0"), std::string::npos) << report.text();
}

TEST(Rendezvous, MissingRanksAreNamedByAll) {
  ZR_SKIP_UNDER_TSAN();
  const std::string job = unique_job();
  CommOptions options;
  options.timeout = Milliseconds{500};
  const ForkReport report = fork_ranks(2, [&](int rank) {
    CommOptions own = options;
    if (rank == 1) own.timeout = Milliseconds{20'000};  // it hears rank 0's verdict
    join_world(job, rank, 5, own);
  });
  expect_all(report, 2, ErrorCode::kTimeout, {"missing ranks 2, 3, 4"});
}

TEST(Rendezvous, RanksThatStartSlowlyHaveTheTimeOfTheFirstStep) {
  ZR_SKIP_UNDER_TSAN();
  const std::string job = unique_job();
  CommOptions options;
  options.timeout = Milliseconds{1};
  options.first_timeout = Milliseconds{20'000};
  const ForkReport report = fork_ranks(2, [&](int rank) {
    if (rank == 1) std::this_thread::sleep_for(Milliseconds{50});
    (void)make_backend("shm", {.rank = rank, .size = 2, .job = job, .options = options});
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

/// What a rank that meets nobody says until its time is over.
std::vector<std::string> said_alone(const std::string& job, int rank, int size, NoticeTimes notices,
                                    const std::string& hint = "") {
  std::vector<std::string> lines;
  const detail::RendezvousSpec spec{.job = job,
                                    .rank = rank,
                                    .size = size,
                                    .timeout = Milliseconds{250},
                                    .notices = notices,
                                    .say = [&lines](std::string_view line) { lines.emplace_back(line); },
                                    .hint = hint};
  EXPECT_THROW((void)detail::meet(spec, [] {}), Error);
  return lines;
}

TEST(Rendezvous, WhoeverWaitsSaysForWhomAndWhere) {
  const std::string job = unique_job();
  const NoticeTimes soon{.first = Milliseconds{1}, .every = Milliseconds{20}};
  const std::vector<std::string> host = said_alone(job, 0, 3, soon, "do this");
  ASSERT_GE(host.size(), 2U) << "again and again";
  EXPECT_EQ(host.front().find("waiting for ranks 1, 2 for "), 0U) << host.front();
  for (const std::string& part :
       {"at the abstract socket @" + detail::socket_name("comm", job) + " of this host (job " + job + ")",
        "this is rank 0 of 3, pid " + std::to_string(::getpid()), std::string("gives up after 0.25 s; hint: do this")})
    EXPECT_NE(host.back().find(part), std::string::npos) << host.back();
  const std::vector<std::string> guest = said_alone(job, 1, 2, soon);
  ASSERT_GE(guest.size(), 2U);
  EXPECT_EQ(guest.front().find("waiting for rank 0 for "), 0U) << guest.front();
  EXPECT_NE(guest.front().find("start the other ranks, or all of them with zeroth-run -n 2 PROGRAM"),
            std::string::npos);
  EXPECT_TRUE(said_alone(job, 0, 2, {}).empty()) << "not before five seconds";
}

TEST(Rendezvous, TheLogOfARankSaysWhoDoesNotCome) {
  CommOptions options;
  options.timeout = Milliseconds{100};
  options.meeting_notices = {.first = Milliseconds{0}, .every = Milliseconds{60'000}};
  ::testing::internal::CaptureStderr();
  EXPECT_THROW(join_world(unique_job(), 0, 2, options), Error);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("[zeroth 0/2] warning: waiting for rank 1 for "), std::string::npos) << log;
}

TEST(Rendezvous, ARankThatHasMetRankZeroLeavesItToSpeak) {
  ZR_SKIP_UNDER_TSAN();
  const std::string job = unique_job();
  const ForkReport report = fork_ranks(2, [&](int rank) {
    int said = 0;
    const detail::RendezvousSpec spec{.job = job,
                                      .rank = rank,
                                      .size = 3,
                                      .timeout = Milliseconds{500},
                                      .notices = {.first = Milliseconds{200}, .every = Milliseconds{50}},
                                      .say = [&said](std::string_view) { ++said; }};
    try {
      (void)detail::meet(spec, [] {});
    } catch (const Error&) {
    }
    ZR_CHECK(rank == 0 ? said > 0 : said == 0, ErrorCode::kInternal, "said " + std::to_string(said), {.where = "test"});
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST(Rendezvous, NobodyAtTheMeetingPointIsATimeout) {
  CommOptions options;
  options.timeout = Milliseconds{100};
  try {
    join_world(unique_job(), 1, 2, options);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout) << error.what();
  }
}

TEST(Rendezvous, ARankThatDiesDuringTheStartIsNamed) {
  ZR_SKIP_UNDER_TSAN();
  const std::string job = unique_job();
  const ForkReport report = fork_ranks(3, [&](int rank) {
    if (rank == 1) {  // it says hello, and dies before all have come
      const UniqueFd connection = detail::connect_to(detail::socket_name("comm", job), [] {});
      std::thread dying([] {
        std::this_thread::sleep_for(Milliseconds{100});
        ::_exit(9);
      });
      try {
        (void)detail::meet({.job = job, .rank = 1, .size = 3, .timeout = Milliseconds{10'000}}, [] {});
      } catch (const Error&) {
      }
      dying.join();
    }
    if (rank == 2) std::this_thread::sleep_for(Milliseconds{600});
    CommOptions options;
    options.timeout = Milliseconds{3'000};
    join_world(job, rank, 3, options);
  });
  ASSERT_NE(report.of(0), nullptr) << report.text();
  EXPECT_EQ(report.of(0)->code, ErrorCode::kPeerLost) << report.text();
  EXPECT_NE(report.of(0)->text.find("rank 1 (pid "), std::string::npos) << report.text();
  EXPECT_NE(report.of(2), nullptr) << report.text();
}

TEST(Rendezvous, StrangersAndOtherVersionsAreToldApart) {
  ZR_SKIP_UNDER_TSAN();
  const std::string job = unique_job();
  // A stranger talks nonsense, another says nothing and a third goes away: the world meets all the same.
  const ForkReport with_strangers =
      fork_ranks(4,
                 [&](int process) {
                   if (process < 2) {
                     if (process == 1) std::this_thread::sleep_for(Milliseconds{200});
                     return join_world(job, process, 2);
                   }
                   try {
                     const UniqueFd connection = detail::connect_to(detail::socket_name("comm", job), [] {});
                     const std::string nonsense = "GET / HTTP/1.1";
                     if (process == 2) {
                       (void)detail::send_message(connection.get(), std::as_bytes(std::span<const char>(nonsense)));
                       std::this_thread::sleep_for(Milliseconds{100});
                     }
                   } catch (const Error&) {
                   }
                 },
                 {.deadline = Milliseconds{20'000}});
  EXPECT_TRUE(with_strangers.ok()) << with_strangers.text();

  // The same first message with another protocol number: see Hello in rendezvous.cpp.
  struct OldHello {
    std::uint64_t magic = 0x5a65726f74682031U;
    std::uint32_t protocol = 999;
    std::int32_t rank = 1;
    std::int32_t size = 2;
    std::int32_t refused = 0;
  };
  const std::string other = unique_job();
  const ForkReport versions = fork_ranks(2, [&](int process) {
    if (process == 0) return join_world(other, 0, 2);
    const UniqueFd connection = detail::connect_to(detail::socket_name("comm", other), [] {});
    const OldHello hello;
    (void)detail::send_message(connection.get(), detail::bytes_of(hello));
    (void)detail::receive_message(connection.get(), 4096, [] {});
  });
  ASSERT_NE(versions.of(0), nullptr);
  EXPECT_EQ(versions.of(0)->code, ErrorCode::kMismatch);
  EXPECT_NE(versions.of(0)->text.find("protocol 999"), std::string::npos) << versions.text();
}

/// A kernel that refuses one of the calls.
class RefusingKernel final : public SystemCalls {
 public:
  explicit RefusingKernel(bool memfd) : memfd_(memfd) {}
  int memfd_create(const char* name, unsigned flags) override {
    return memfd_ ? refuse() : kernel_->memfd_create(name, flags);
  }
  int pidfd_open(pid_t pid) override { return memfd_ ? kernel_->pidfd_open(pid) : refuse(); }
  ssize_t read_process(pid_t pid, std::byte* to, std::uint64_t from, std::size_t bytes) override {
    return kernel_->read_process(pid, to, from, bytes);
  }

 private:
  static int refuse() {
    errno = EPERM;
    return -1;
  }
  bool memfd_;
  std::shared_ptr<SystemCalls> kernel_ = make_system_calls();
};

TEST(Rendezvous, ACallRefusedToOneRankEndsAllAtOnce) {
  ZR_SKIP_UNDER_TSAN();
  for (const bool memfd : {true, false}) {
    for (const int victim : {0, 2}) {
      const std::string job = unique_job();
      const auto begin = std::chrono::steady_clock::now();
      const ForkReport report = fork_ranks(3, [&](int rank) {
        CommOptions options;
        options.timeout = Milliseconds{30'000};
        if (rank == victim) options.system = std::make_shared<RefusingKernel>(memfd);
        if (rank == 1) std::this_thread::sleep_for(Milliseconds{200});  // comes after the refusal
        join_world(job, rank, 3, options);
      });
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds{15}) << "ended by the timeout";
      const std::string call = memfd ? "memfd_create" : "pidfd_open";
      for (int rank = 0; rank < 3; ++rank) {
        ASSERT_NE(report.of(rank), nullptr) << "rank " << rank << " met";
        EXPECT_EQ(report.of(rank)->code, ErrorCode::kResource) << report.text();
        EXPECT_NE(report.of(rank)->text.find(call + " failed on rank " + std::to_string(victim)), std::string::npos)
            << report.text();
        EXPECT_NE(report.of(rank)->text.find("seccomp"), std::string::npos) << report.text();
      }
    }
  }
}

TEST(Rendezvous, TheNameIsFreeAgainForTheNextWorld) {
  ZR_SKIP_UNDER_TSAN();
  const std::string job = unique_job();
  const ForkReport report = fork_ranks(3, [&](int rank) {
    const auto first =
        make_backend("shm", {.rank = rank, .size = 3, .job = job, .hub = nullptr, .options = quick_options()});
    for (int world = 0; world < 5; ++world) join_world(job, rank, 3);
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

}  // namespace
}  // namespace zeroth
