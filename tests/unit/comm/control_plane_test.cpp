// The control plane between ranks that are threads: over each transport, with strangers, and where a rank hangs, leaves
// or gives up.
#include "comm/control/control_link.h"
#include "support/error_of.h"
#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/comm/control_plane.h>
#include <zeroth/comm/decorators.h>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <string>
#include <thread>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Member {
  std::shared_ptr<RankActivity> activity;
  std::shared_ptr<ControlPlane> control;
  std::shared_ptr<CommBackend> backend;
};
using MemberBody = std::function<void(int rank, const Member& member)>;

class ControlPlaneTest : public testing::TestWithParam<ThreadTransport> {
 protected:
  RankReport run(int world, Milliseconds timeout, const MemberBody& body) {
    ThreadRanksOptions options;
    options.transport = GetParam();
    options.abort_on_failure = false;
    options.comm.timeout = timeout;
    options.comm.first_timeout = timeout;
    if (GetParam() == ThreadTransport::kLevels || GetParam() == ThreadTransport::kSilentLevels)
      options.comm.nodes = nodes_of_ranks(world, world / 2);
    for (int rank = 0; rank < world; ++rank) {
      activities_.push_back(std::make_shared<RankActivity>(rank, world));
      activities_.back()->set_first_timeout(timeout);
    }
    options.activities = activities_;
    return try_ranks(
        world,
        [&](int rank, const std::shared_ptr<CommBackend>& backend) {
          const auto& activity = activities_[static_cast<std::size_t>(rank)];
          const std::shared_ptr<ControlPlane> control = ControlPlane::join(*backend, activity,
                                                                           {.timeout = Milliseconds{20'000},
                                                                            .silent_after = Milliseconds{10'000},
                                                                            .trace_folder = trace_folder_,
                                                                            .logger = {}});
          if (rank == 0) hub_address_ = control->address();
          const Member member{activity, control,
                              std::make_shared<RecordingBackend>(backend->split(0, rank, "job"), activity, control)};
          try {
            body(rank, member);
          } catch (...) {
            // Nobody goes before all know: the transports would tell of the one that left.
            if (++failed_ == world - kept_) done_.store(true);
            while (!done_.load()) std::this_thread::sleep_for(Milliseconds{10});
            throw;
          }
        },
        options);
  }

  std::vector<std::shared_ptr<RankActivity>> activities_;
  std::string hub_address_;
  std::atomic<int> failed_{0};
  std::atomic<bool> done_{false};
  int kept_ = 0;  ///< ranks that do not fail
  std::string trace_folder_{};
};

void barrier(const Member& member) {
  Communicator(member.backend).barrier();
}

TEST_P(ControlPlaneTest, AnOrdinaryRunHearsNothingOfIt) {
  const RankReport report = run(4, Milliseconds{20'000}, [&](int /*rank*/, const Member& member) {
    std::vector<float> data(1'000, 1.0F);
    for (int call = 0; call < 100; ++call) Communicator(member.backend).all_reduce(std::span(data));
    require(member.activity->recorder().records().size() == 100, "100 calls are recorded");
    require(member.activity->recorder().records().back().ended_ns != 0, "all have ended");
    require(member.control->strangers() == 0, "no stranger");
  });
  EXPECT_EQ(report.text(), "");
}

TEST_P(ControlPlaneTest, AtTheDeadlineAllRanksEndWithOneLine) {
  kept_ = 1;
  const RankReport report = run(4, Milliseconds{1'500}, [&](int rank, const Member& member) {
    member.activity->set_locator([rank](pid_t) { return "train.py:5" + std::to_string(rank); });
    barrier(member);
    if (rank == 2) {
      member.activity->enter(Phase::kBetweenSteps);
      while (!done_.load()) std::this_thread::sleep_for(Milliseconds{10});
      return;
    }
    barrier(member);
  });
  ASSERT_EQ(report.failures.size(), 3U) << report.text();
  for (const RankFailure& failure : report.failures) {
    EXPECT_EQ(failure.code, ErrorCode::kTimeout);
    EXPECT_THAT(failure.text,
                AllOf(HasSubstr("rank 2 (pid"), HasSubstr("is between steps, after step 0, at train.py:52"),
                      HasSubstr("barrier#"), HasSubstr("ranks 0, 1, 3 wait")));
    EXPECT_THAT(failure.text,
                HasSubstr("who: rank " + std::to_string(failure.rank) + "/4; "));  // not a number inside a level
  }
}

TEST_P(ControlPlaneTest, CallsOfSomeRanksOnlyAreFoundLongBeforeTheDeadline) {
  const auto begin = SteadyClock::now();
  const RankReport report = run(4, Milliseconds{60'000}, [&](int rank, const Member& member) {
    const std::shared_ptr<CommBackend> some = member.backend->split(rank == 3 ? 1 : 0, rank, "some");
    const std::shared_ptr<CommBackend> pair = member.backend->split(rank == 0 || rank == 3 ? 0 : 1, rank, "pair");
    if (rank == 3) {
      Communicator(pair).barrier();  // with rank 0
    } else {
      Communicator(some).barrier();
      Communicator(member.backend).barrier();  // rank 0 waits for rank 3 here, and rank 3 for rank 0 there
    }
  });
  EXPECT_LT(SteadyClock::now() - begin, Milliseconds{30'000});
  ASSERT_EQ(report.failures.size(), 4U) << report.text();
  for (const RankFailure& failure : report.failures) {
    EXPECT_EQ(failure.code, ErrorCode::kMismatch) << failure.text;
    EXPECT_THAT(failure.text, AllOf(HasSubstr("[MISMATCH]"), HasSubstr("ranks wait for each other in different calls"),
                                    HasSubstr("rank 3 waits for barrier#")));
  }
}

TEST_P(ControlPlaneTest, CallsOfDifferentSizesAreFoundWhereverTheyAreMade) {
  const RankReport report = run(4, Milliseconds{60'000}, [&](int rank, const Member& member) {
    barrier(member);                                    // else a rank that still makes its groups may hear of it there
    std::vector<float> data(rank == 3 ? 100'000 : 20);  // of a mixture's backends one, or the other
    Communicator(member.backend).all_reduce(std::span(data));
  });
  ASSERT_EQ(report.failures.size(), 4U) << report.text();
  for (const RankFailure& failure : report.failures)
    EXPECT_THAT(failure.text, AllOf(HasSubstr("[MISMATCH]"), HasSubstr("100000 elements"), HasSubstr("20 elements")));
}

TEST_P(ControlPlaneTest, WhatTwoRanksAloneCanSeeAllHear) {
  const auto begin = SteadyClock::now();
  for (const bool parts : {false, true}) {
    activities_.clear();
    failed_ = 0;
    done_ = false;
    const RankReport report = run(4, Milliseconds{60'000}, [&](int rank, const Member& member) {
      const Communicator comm(member.backend);
      comm.barrier();  // as above
      std::vector<float> data(10);
      if (parts) {
        const std::vector<std::int64_t> takes{1, 2, 3, 4};
        std::vector<std::int64_t> gives(4, rank + 1);
        if (rank == 3) gives = {4, 5, 4, 4};  // to rank 1, which takes 4
        std::vector<float> given(static_cast<std::size_t>(rank == 3 ? 17 : 4 * (rank + 1)));
        comm.all_to_all(std::span<const float>(given), std::span(data), gives, takes);
      } else {
        if (rank == 0) comm.send(std::span<const float>(data).first(4), 1);
        if (rank == 1) comm.recv(std::span(data).first(5), 0);
      }
      comm.barrier();
    });
    ASSERT_EQ(report.failures.size(), 4U) << report.text();
    for (const RankFailure& failure : report.failures) {
      EXPECT_THAT(failure.text, AllOf(HasSubstr("[MISMATCH]"), HasSubstr("4 elements"), HasSubstr("5 elements"),
                                      HasSubstr(parts ? "all_to_all" : "recv")));
    }
  }
  EXPECT_LT(SteadyClock::now() - begin, Milliseconds{30'000});
}

TEST_P(ControlPlaneTest, WhatOneRankTellsAllThrow) {
  trace_folder_ = "/nonexistent/folder";  // a record that cannot be written hides nothing
  const RankReport report = run(4, Milliseconds{60'000}, [&](int rank, const Member& member) {
    barrier(member);
    if (rank == 1) member.control->tell(Error(ErrorCode::kIo, "the disk is full"));
    barrier(member);
    std::this_thread::sleep_for(Milliseconds{1'000});
    barrier(member);  // no wait at all: the check at the door
  });
  ASSERT_EQ(report.failures.size(), 4U) << report.text();
  for (const RankFailure& failure : report.failures) EXPECT_EQ(failure.code, ErrorCode::kIo);
}

TEST_P(ControlPlaneTest, WhatARankTellsAsItEndsIsHeard) {
  kept_ = 1;
  for (const int teller : {0, 2}) {
    activities_.clear();
    failed_ = 0;
    done_ = false;
    const RankReport report = run(3, Milliseconds{60'000}, [&](int rank, const Member& member) {
      barrier(member);
      if (rank == teller) return member.control->tell(Error(ErrorCode::kPeerLost, "rank 7 was killed"));
      barrier(member);
    });
    ASSERT_EQ(report.failures.size(), 2U) << report.text();
    for (const RankFailure& failure : report.failures)
      EXPECT_EQ(failure.text.substr(0, 31), "[PEER_LOST] rank 7 was killed; ") << failure.text;
  }
}

std::string name_of_transport(const testing::TestParamInfo<ThreadTransport>& info) {
  return std::array<std::string, 5>{"Memory", "Messages", "Levels", "Mixed", "SilentLevels"}.at(
      static_cast<std::size_t>(info.param));
}
INSTANTIATE_TEST_SUITE_P(All, ControlPlaneTest,
                         testing::Values(ThreadTransport::kMemory, ThreadTransport::kMessages, ThreadTransport::kLevels,
                                         ThreadTransport::kMixed, ThreadTransport::kSilentLevels),
                         name_of_transport);

using ControlPlaneOnce = ControlPlaneTest;
INSTANTIATE_TEST_SUITE_P(Memory, ControlPlaneOnce, testing::Values(ThreadTransport::kMemory),
                         [](const auto&) { return "Memory"; });

TEST_P(ControlPlaneOnce, StrangersAreDroppedAndCounted) {
  const RankReport report = run(2, Milliseconds{20'000}, [&](int rank, const Member& member) {
    if (rank == 0) {
      const std::size_t colon = hub_address_.rfind(':');
      const detail::TcpAddress address{hub_address_.substr(0, colon),
                                       static_cast<std::uint16_t>(std::stoi(hub_address_.substr(colon + 1)))};
      const std::string http = "GET / HTTP/1.1\r\n\r\n";
      const detail::HelloMessage wrong{.nonce = {1, 2, 3}, .rank = 1, .size = 2, .pid = 1, .host = "h"};
      const std::vector<std::byte> guess = detail::encode(wrong);
      std::uint64_t sent = 0;
      for (const std::string_view bytes :
           {std::string_view(http), std::string_view(reinterpret_cast<const char*>(guess.data()), guess.size())}) {
        std::string why;
        const detail::ForkClosedFd stranger = detail::connect_tcp(address, Deadline(Milliseconds{5'000}), why);
        require(static_cast<bool>(stranger), "the stranger reaches the port: " + why);
        require(::write(stranger.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
                "and speaks");
        ++sent;
        const Deadline deadline(Milliseconds{10'000});
        while (member.control->strangers() < sent && !deadline.passed()) std::this_thread::sleep_for(Milliseconds{10});
        require(member.control->strangers() == sent, "it is counted");
        pollfd end{.fd = stranger.get(), .events = POLLIN, .revents = 0};
        std::array<char, 64> challenge{};
        const auto dropped = [&] {
          return ::poll(&end, 1, 5'000) == 1 && ::read(stranger.get(), challenge.data(), challenge.size()) <= 0;
        };
        require(dropped() || dropped(), "and dropped, after the challenge");
      }
    }
    barrier(member);  // goes on
  });
  EXPECT_EQ(report.text(), "");
}

TEST(RankActivity, WhoIsWokenByAWaitSeesWhatItIsFor) {
  RankActivity activity(0, 2);
  std::vector<std::string> seen;
  activity.set_waker([&] { seen.push_back(activity.status(false).wait.report.call); });
  const auto report = [] {
    return WaitReport{.group = "world", .call = "barrier#3", .ranks = {1}, .timeout = Milliseconds{100}};
  };
  {
    WatchedWait wait(&activity);
    wait.look(report);
    wait.look(report);
  }
  activity.set_waker(nullptr);
  EXPECT_EQ(seen, std::vector<std::string>{"barrier#3"});
  EXPECT_EQ(activity.status(false).wait.id, 0U);
}

TEST(ForkClosedFd, IsClosedInAForkedChildOnly) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const int copy = ::dup(ends[0]);
  detail::ForkClosedFd closed{UniqueFd(copy)};
  const pid_t child = ::fork();
  if (child == 0) {
    const bool gone = ::fcntl(copy, F_GETFD) < 0 && ::fcntl(ends[0], F_GETFD) >= 0;
    closed.reset();  // must not close what may have this number by now
    ::_exit(gone ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_GE(::fcntl(copy, F_GETFD), 0) << "the parent keeps its own";
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(OwnAddresses, AreThoseOfANameThatThisHostHas) {
  using Hosts = std::vector<std::string>;
  const Hosts own{"192.0.2.7", "2001:db8::7", "198.51.100.1"};
  EXPECT_EQ(detail::own_addresses_of("192.0.2.7", own), (Hosts{"192.0.2.7"}));
  EXPECT_EQ(detail::own_addresses_of("2001:db8::7", own), (Hosts{"2001:db8::7"}));
  EXPECT_EQ(detail::own_addresses_of("192.0.2.8", own), Hosts{}) << "another host's";
  EXPECT_EQ(detail::own_addresses_of("", own), Hosts{});
  EXPECT_EQ(detail::own_addresses_of("localhost", own), Hosts{}) << "which nobody else reaches";
  EXPECT_EQ(detail::own_addresses_of("localhost", {"127.0.0.1"}), (Hosts{"127.0.0.1"}))
      << "a name counts as what it stands for";
  EXPECT_EQ(detail::own_addresses_of("no such host", own), Hosts{});
}

TEST_P(ControlPlaneOnce, AnInterfaceThatIsNotThereIsNamed) {
  ThreadRanksOptions options;
  options.abort_on_failure = false;
  const RankReport report = try_ranks(
      2,
      [&](int rank, const std::shared_ptr<CommBackend>& backend) {
        const auto activity = std::make_shared<RankActivity>(rank, 2);
        (void)ControlPlane::join(*backend, activity, {.interface = "nosuch0", .logger = {}});
      },
      options);
  ASSERT_EQ(report.failures.size(), 2U);
  for (const RankFailure& failure : report.failures) {
    EXPECT_EQ(failure.code, ErrorCode::kResource);
    EXPECT_THAT(failure.text, AllOf(HasSubstr("ZEROTH_INTERFACE"), HasSubstr("nosuch0"), HasSubstr("lo")));
  }
}

}  // namespace
}  // namespace zeroth::test
