// Ranks that die, leave, freeze, abort or never come: the others end with an error that names them.
#include "conformance/world_runner.h"
#include "support/left_behind.h"
#include "support/sanitizer.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/comm/decorators.h>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::test {
namespace {

struct Operation {
  std::string name{};
  std::function<void(const Communicator&)> run{};
};

/// The first ones, which a whole world can make over and over.
constexpr std::size_t kMatchedOperations = 15;

std::vector<Operation> operations() {
  const auto gather = [](std::size_t part) {
    return [part](const Communicator& comm) {
      const std::vector<float> in(part);
      std::vector<float> out(part * static_cast<std::size_t>(comm.size()));
      comm.all_gather(std::span<const float>(in), std::span(out));
    };
  };
  const auto scatter = [](std::size_t part) {
    return [part](const Communicator& comm) {
      const std::vector<float> in(part * static_cast<std::size_t>(comm.size()));
      std::vector<float> out(part);
      comm.reduce_scatter(std::span<const float>(in), std::span(out));
    };
  };
  const auto reduce = [](std::size_t count) {
    return [count](const Communicator& comm) {
      std::vector<float> data(count);
      comm.all_reduce(std::span(data));
    };
  };
  const auto broadcast = [](std::size_t count) {
    return [count](const Communicator& comm) {
      std::vector<float> data(count);
      comm.broadcast(std::span(data), comm.size() - 1);
    };
  };
  const auto gather_last = [](std::size_t part) {
    return [part](const Communicator& comm) {
      const int root = comm.size() - 1;
      const std::vector<float> in(part);
      std::vector<float> out(comm.rank() == root ? part * static_cast<std::size_t>(comm.size()) : 0);
      comm.gather(std::span<const float>(in), std::span(out), root);
    };
  };
  const auto scatter_first = [](std::size_t part) {
    return [part](const Communicator& comm) {
      const std::vector<float> in(comm.rank() == 0 ? part * static_cast<std::size_t>(comm.size()) : 0);
      std::vector<float> out(part);
      comm.scatter(std::span<const float>(in), std::span(out), 0);
    };
  };
  const auto exchange = [](std::size_t part) {
    return [part](const Communicator& comm) {
      const std::vector<float> in(part * static_cast<std::size_t>(comm.size()));
      std::vector<float> out(in.size());
      comm.all_to_all(std::span<const float>(in), std::span(out));
    };
  };
  return {
      {"barrier", [](const Communicator& comm) { comm.barrier(); }},
      {"all_gather", gather(10)},
      {"all_gather", gather(300'000)},
      {"reduce_scatter", scatter(10)},
      {"reduce_scatter", scatter(300'000)},
      {"all_reduce", reduce(10)},
      {"all_reduce", reduce(1'000'000)},
      {"broadcast", broadcast(10)},
      {"broadcast", broadcast(1'000'000)},
      {"gather", gather_last(10)},
      {"gather", gather_last(300'000)},
      {"scatter", scatter_first(10)},
      {"scatter", scatter_first(300'000)},
      {"all_to_all", exchange(10)},
      {"all_to_all", exchange(300'000)},
      {"recv",
       [](const Communicator& comm) {
         std::vector<float> data(10);
         comm.recv(std::span(data), comm.size() - 1);
       }},
      {"send",
       [](const Communicator& comm) {
         const std::vector<float> data(1'000'000);
         comm.send(std::span<const float>(data), comm.size() - 1);
       }},
      {"attach",
       [](const Communicator& comm) {
         const Arena arena = Arena::create(comm.backend().capabilities().window_kind, kPageBytes, "test");
         [[maybe_unused]] const PeerWindow window = comm.backend().attach(arena, "test");
       }},
      {"split",
       [](const Communicator& comm) { [[maybe_unused]] const auto part = comm.backend().split(0, 0, "part"); }},
      {"parameters of unit block.3",
       [](const Communicator& comm) {
         comm.backend().wait_until([] { return false; }, {.what = "parameters of unit block.3",
                                                          .ranks = {comm.size() - 1},
                                                          .unit = "block.3",
                                                          .progress = [] { return "epoch 6"; }});
       }},
  };
}

WorldOptions impatient() {
  WorldOptions options;
  options.comm.frozen_after = Milliseconds{500};
  options.abort_on_failure = false;
  return options;
}

/// From the end of a rank to that of every other one.
constexpr Milliseconds kEndsWithin{kSanitized ? 10'000 : 2'000};

/// Ranks that are processes have ended in time, or before the culprit.
void expect_prompt(const RankReport& report, int culprit) {
  for (const Milliseconds ended : report.ended)
    EXPECT_LT(ended - report.ended[static_cast<std::size_t>(culprit)], kEndsWithin) << report.text();
}

/// The last rank does `misdeed` where the others make the call; every other rank must end with `code` and all
/// `texts`.
void expect_lost(const WorldParam& param,
                 const std::function<void(const Operation&, const std::shared_ptr<CommBackend>&)>& misdeed,
                 ErrorCode code, const std::vector<std::string>& texts, const WorldOptions& options) {
  for (const Operation& operation : operations()) {
    SCOPED_TRACE(operation.name);
    const int culprit = param.size - 1;
    const RankReport report = run_world(
        param,
        [&](int rank, const std::shared_ptr<CommBackend>& backend) {
          const Communicator comm(backend);
          comm.barrier();
          if (rank == culprit) {
            misdeed(operation, backend);
          } else {
            operation.run(comm);
            throw std::runtime_error("the call succeeded without a rank");
          }
        },
        options);
    expect_prompt(report, culprit);
    for (int rank = 0; rank < culprit; ++rank) {
      const RankFailure* failure = report.of(rank);
      ASSERT_NE(failure, nullptr) << "rank " << rank << " saw nothing\n" << report.text();
      EXPECT_EQ(failure->code, code) << failure->text;
      for (const std::string& text : texts) EXPECT_NE(failure->text.find(text), std::string::npos) << failure->text;
      EXPECT_NE(failure->text.find("rank " + std::to_string(culprit)), std::string::npos) << failure->text;
      EXPECT_NE(failure->text.find(operation.name), std::string::npos) << failure->text;
    }
  }
}

/// Worlds whose ranks see why one is missing, in every call.
std::vector<WorldParam> worlds_that_see() {
  std::vector<WorldParam> worlds = several_ranks();
  for (const WorldParam& world : several_ranks_of_nccl()) worlds.push_back(world);
  return worlds;
}

class Faults : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, Faults, ::testing::ValuesIn(worlds_that_see()), name_of_param);

class ProcessFaults : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, ProcessFaults, ::testing::Values(WorldParam{"shm", 2}, WorldParam{"shm", 4}),
                         name_of_param);

TEST_P(Faults, ARankThatLeavesEarlyIsNamed) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_lost(GetParam(), [](const auto&, const auto&) {}, ErrorCode::kPeerLost, {"left early"}, impatient());
}

TEST_P(Faults, AnAbortReachesEveryWait) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_lost(
      GetParam(),
      [](const auto&, const auto& backend) {
        backend->abort(Error(ErrorCode::kNonFinite, "the loss is gone", {.which = "parameter w"}));
      },
      ErrorCode::kAborted, {"the loss is gone", "NONFINITE", "parameter w"}, impatient());
}

TEST_P(Faults, ARankThatNeverCallsIsATimeout) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  WorldOptions options = impatient();
  options.comm.timeout = Milliseconds{250};
  expect_lost(
      GetParam(),
      [](const auto&, const auto& backend) {
        // Alive until all others have given up.
        for (int rank = 0; rank + 1 < backend->size();) {
          try {
            backend->wait_until([] { return false; }, {.what = "the end of the others", .ranks = {rank}});
          } catch (const Error& error) {
            if (error.code() == ErrorCode::kPeerLost) ++rank;
          }
        }
      },
      ErrorCode::kTimeout, {"every peer is alive"}, options);
}

TEST_P(Faults, AbortWakesASleeperAndIsFirstComeFirstServed) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(),
                                      [](int rank, const std::shared_ptr<CommBackend>& backend) {
                                        const Communicator comm(backend);
                                        comm.barrier();
                                        backend->abort(Error(ErrorCode::kModel, "cause " + std::to_string(rank)));
                                        try {
                                          comm.barrier();
                                        } catch (const Error& error) {
                                          require(error.code() == ErrorCode::kAborted, error.what());
                                          // All ranks tell the same cause: write it where the parent can compare.
                                          throw std::runtime_error(error.message());
                                        }
                                      },
                                      {.abort_on_failure = false});
  ASSERT_EQ(report.failures.size(), static_cast<std::size_t>(GetParam().size));
  for (const RankFailure& failure : report.failures) {
    EXPECT_NE(failure.text.find("cause"), std::string::npos) << failure.text;
    EXPECT_EQ(failure.text, report.failures.front().text);
  }
}

TEST_P(ProcessFaults, AKilledRankIsNamedWithItsSignal) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_lost(
      GetParam(), [](const auto&, const auto&) { ::raise(SIGKILL); }, ErrorCode::kPeerLost,
      {"SIGKILL (signal 9)", "pid "}, impatient());
}

TEST_P(ProcessFaults, AnExitWithoutGoodbyeIsNamedWithItsCode) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_lost(
      GetParam(), [](const auto&, const auto&) { ::_exit(3); }, ErrorCode::kPeerLost, {"exited with code 3"},
      impatient());
}

TEST_P(ProcessFaults, AStoppedRankIsFrozen) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  WorldOptions options = impatient();
  options.meanwhile = [](const std::vector<pid_t>& pids, Milliseconds) {
    // The others have gone (and were collected): end the stopped one.
    for (std::size_t rank = 0; rank + 1 < pids.size(); ++rank) {
      if (::kill(pids[rank], 0) == 0) return true;
    }
    ::kill(pids.back(), SIGKILL);
    return false;
  };
  expect_lost(
      GetParam(), [](const auto&, const auto&) { ::raise(SIGSTOP); }, ErrorCode::kPeerLost,
      {"frozen", "process state T"}, options);
}

TEST_P(ProcessFaults, ARankKilledInTheMiddleOfCalls) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  for (int attempt = 0; attempt < 6; ++attempt) {
    WorldOptions options = impatient();
    const std::size_t victim = static_cast<std::size_t>(attempt) % static_cast<std::size_t>(GetParam().size);
    int begun[2];
    ASSERT_EQ(::pipe2(begun, O_NONBLOCK | O_CLOEXEC), 0);
    int at_work = 0;
    Milliseconds since_when{};
    options.meanwhile = [&](const std::vector<pid_t>& pids, Milliseconds since) {
      for (char rank = 0; at_work < GetParam().size && ::read(begun[0], &rank, 1) == 1;) {
        ++at_work;
        since_when = since;
      }
      if (at_work < GetParam().size || since < since_when + Milliseconds{13 * attempt}) return true;
      ::kill(pids[victim], SIGKILL);
      return false;
    };
    const RankReport report = run_world(
        GetParam(),
        [&](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
          const Communicator comm(backend);
          const std::vector<Operation> calls = operations();
          comm.barrier();
          require(::write(begun[1], "", 1) == 1, "the parent is not told");
          for (;;) {
            for (std::size_t call = 0; call < kMatchedOperations; ++call) calls[call].run(comm);
          }
        },
        options);
    for (const int end : begun) ::close(end);
    ASSERT_EQ(report.failures.size(), static_cast<std::size_t>(GetParam().size));
    expect_prompt(report, static_cast<int>(victim));
    for (const RankFailure& failure : report.failures) {
      if (failure.rank == static_cast<int>(victim)) {
        EXPECT_EQ(failure.text, "killed by signal 9");
        continue;
      }
      EXPECT_EQ(failure.code, ErrorCode::kPeerLost) << failure.text;
    }
  }
}

/// Transports that see a stream end, and not why; and NCCL's, where a call may be done on a rank that needed nothing
/// from the missing one. A rank may see only that a survivor has left: nobody else tells it the cause, unless a program
/// calls abort().
class MessageFaults : public ::testing::TestWithParam<WorldParam> {
 protected:
  /// All other ranks end with one of `codes`; at least one of them names the culprit, the call and these texts.
  static void expect_end(const std::function<void(const std::shared_ptr<CommBackend>&)>& misdeed,
                         const std::set<ErrorCode>& codes, const std::vector<std::string>& texts,
                         const WorldOptions& options) {
    const WorldParam& param = GetParam();
    const std::vector<Operation> calls = operations();
    const int culprit = param.size - 1;
    for (std::size_t index = 0; index < kMatchedOperations; ++index) {
      const bool small_or_large = index < 2 ? index == 0 : index % 3 == 2;
      if (!is_gpu_world(param.backend) && !small_or_large) continue;  // processes take their time: one of both
      SCOPED_TRACE(calls[index].name);
      const RankReport report = run_world(
          param,
          [&](int rank, const std::shared_ptr<CommBackend>& backend) {
            const Communicator comm(backend);
            comm.barrier();
            if (rank == culprit) return misdeed(backend);
            calls[index].run(comm);
            comm.barrier();
            throw std::runtime_error("two calls succeeded without a rank");
          },
          options);
      int naming = 0;
      for (int rank = 0; rank < culprit; ++rank) {
        const RankFailure* failure = report.of(rank);
        ASSERT_NE(failure, nullptr) << "rank " << rank << " saw nothing\n" << report.text();
        ASSERT_TRUE(failure->code.has_value()) << failure->text;
        EXPECT_TRUE(codes.contains(*failure->code)) << failure->text;
        const auto says = [&](const std::string& text) { return failure->text.find(text) != std::string::npos; };
        const bool names_call = says(calls[index].name) || says("barrier");
        // In levels it is rank 1 of node 1.
        const bool names_rank = says("rank " + std::to_string(culprit)) ||
                                (param.per_node > 0 && says("of node 1; ") && says("from rank 1"));
        naming += names_rank && names_call && std::ranges::all_of(texts, says) ? 1 : 0;
      }
      EXPECT_GE(naming, 1) << report.text();
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Transports, MessageFaults,
                         ::testing::Values(WorldParam{"sockets", 2}, WorldParam{"sockets", 3},
                                           WorldParam{"shm+sockets", 4, 2}, WorldParam{"nccl", 3}),
                         name_of_param);

TEST_P(MessageFaults, ARankThatLeavesEarlyIsNamed) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_end([](const auto&) {}, {ErrorCode::kPeerLost}, {}, impatient());
}

TEST_P(MessageFaults, AnAbortReachesEveryWait) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_end(
      [](const auto& backend) {
        backend->abort(Error(ErrorCode::kNonFinite, "the loss is gone", {.which = "parameter w"}));
      },
      {ErrorCode::kAborted, ErrorCode::kPeerLost}, {"the loss is gone", "NONFINITE", "parameter w"}, impatient());
}

TEST_P(MessageFaults, ARankThatNeverCallsIsATimeout) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  WorldOptions options = impatient();
  options.comm.timeout = Milliseconds{250};
  expect_end([](const auto&) { std::this_thread::sleep_for(Milliseconds{900}); },
             {ErrorCode::kTimeout, ErrorCode::kPeerLost}, {"[TIMEOUT]"}, options);
}

/// One rank dies inside a call that all have begun: by the failpoint between the agreement about the call and its data,
/// and for large data over shared memory between two rounds. As gloo's tests kill in every collective, here on every
/// transport between processes.
class KilledInside : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Transports, KilledInside,
                         ::testing::Values(WorldParam{"shm", 2}, WorldParam{"shm", 3}, WorldParam{"staged", 3},
                                           WorldParam{"sockets", 2}, WorldParam{"sockets", 3},
                                           WorldParam{"shm+sockets", 4, 2}),
                         name_of_param);

/// Failpoints at which a rank is inside `call`.
std::vector<std::string> inside(const WorldParam& param, const Operation& call, bool large) {
  const std::string site = "." + call.name + ".mid";
  const bool has_rounds = large && call.name != "barrier" && call.name != "all_to_all";
  if (param.backend == "staged" && has_rounds)
    return {"shm" + site, "shm.staged.round@hit=1", "shm.staged.round@hit=3"};
  if (param.backend == "shm" && has_rounds) return {"shm" + site, "shm.direct.read"};
  if (param.backend == "shm" || param.backend == "staged") return {"shm" + site};
  if (param.backend == "sockets") return {"messages" + site};
  return {"levels.step"};
}

TEST_P(KilledInside, EachCallEndsOnEveryOtherRankWithBothNames) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const WorldParam& param = GetParam();
  const std::vector<Operation> calls = operations();
  for (std::size_t index = 0; index < kMatchedOperations; ++index) {
    const Operation& call = calls[index];
    for (const std::string& site : inside(param, call, index > 0 && index % 2 == 0)) {
      for (const int victim : {0, param.size - 1}) {
        SCOPED_TRACE(call.name + " at " + site + ", victim " + std::to_string(victim));
        const RankReport report = run_world(
            param,
            [&](int rank, const std::shared_ptr<CommBackend>& backend) {
              const Communicator comm(backend);
              comm.barrier();
              if (rank == victim) arm_failpoints(parse_failpoints(site + ":kill"), rank);
              call.run(comm);
              comm.barrier();
              throw std::runtime_error("two calls succeeded without a rank");
            },
            impatient());
        expect_prompt(report, victim);
        int naming = 0;
        for (int rank = 0; rank < param.size; ++rank) {
          const RankFailure* failure = report.of(rank);
          ASSERT_NE(failure, nullptr) << "rank " << rank << " saw nothing\n" << report.text();
          if (rank == victim) {
            EXPECT_EQ(failure->text, "killed by signal 9");
            continue;
          }
          ASSERT_TRUE(failure->code.has_value()) << failure->text;
          EXPECT_EQ(exit_code(*failure->code), 76) << failure->text;
          EXPECT_TRUE(failure->text.find(call.name) != std::string::npos ||
                      failure->text.find("barrier") != std::string::npos)
              << failure->text;
          if (failure->text.find("rank " + std::to_string(victim)) != std::string::npos) ++naming;
        }
        // Over sockets a rank may see only that a survivor has left: nobody else tells it why, unless a program calls
        // abort().
        EXPECT_GE(naming, param.backend == "sockets" ? 1 : param.size - 1) << report.text();
      }
    }
  }
}

TEST(ProcessLeavings, NothingIsLeftBehind) {
  if (kThreadSanitizer) GTEST_SKIP() << "not under sanitizers: forked ranks";
  for (const bool killed : {false, true}) {
    const RankReport report = run_world(
        {"shm", 3},
        [&](int rank, const std::shared_ptr<CommBackend>& backend) {
          const Communicator comm(backend);
          comm.barrier();
          if (killed && rank == 1) ::raise(SIGKILL);
          std::vector<float> data(100'000);
          comm.all_reduce(std::span(data));
          const std::set<std::string> before = holdings();
          {
            const std::shared_ptr<CommBackend> part = backend->split(0, rank, "part");
            const Arena arena = Arena::create(ArenaKind::kShared, kPageBytes, "test");
            [[maybe_unused]] const PeerWindow window = part->attach(arena, "test");
            Communicator(part).barrier();
          }
          const std::string kept = still_held(before);
          require(kept.empty(), "a group that has gone keeps\n" + kept);
        },
        impatient());
    EXPECT_EQ(report.ok(), !killed) << report.text();
  }
}

TEST(ProcessLeavings, AForkedChildThatDropsItsCopyHarmsNobody) {
  if (kThreadSanitizer) GTEST_SKIP() << "not under sanitizers: forked ranks";
  const RankReport report = run_world({"shm", 2}, [](int rank, const std::shared_ptr<CommBackend>& backend) {
    std::shared_ptr<CommBackend> part = backend->split(0, rank, "part");
    const pid_t child = ::fork();
    if (child == 0) {
      // As a worker of a data loader does that cleans up; the last reference to everything goes here.
      auto& world = const_cast<std::shared_ptr<CommBackend>&>(backend);
      part.reset();
      world.reset();
      ::_exit(0);
    }
    int status = -1;
    const auto start = SteadyClock::now();
    while (::waitpid(child, &status, WNOHANG) == 0) {
      if (SteadyClock::now() - start > Milliseconds{20'000}) {
        ::kill(child, SIGKILL);
        ::waitpid(child, &status, 0);
        throw std::runtime_error("the child hangs");
      }
      std::this_thread::sleep_for(Milliseconds{2});
    }
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child crashed");
    Communicator(part).barrier();
    Communicator(backend).barrier();
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

}  // namespace
}  // namespace zeroth::test
