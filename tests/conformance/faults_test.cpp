// Ranks that die, leave, freeze, abort or never come: the others end with an error that names them.
//
// `make test` runs rows in which any two of backend, number of ranks, misdeed and call meet; all of them together are
// of the long tier.
#include "conformance/world_runner.h"
#include "support/covering_array.h"
#include "support/left_behind.h"
#include "support/sanitizer.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/comm/decorators.h>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
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
      {"recv",
       [](const Communicator& comm) {
         std::vector<float> data(10);
         comm.start_recv(std::span(data), comm.size() - 1)->wait();
       }},
      {"send",
       [](const Communicator& comm) {
         const std::vector<float> data(1'000'000);
         const std::unique_ptr<PendingPoints> pending = comm.start_send(std::span<const float>(data), comm.size() - 1);
         // Who asks hears of a loss as who waits does, but for a rank that is alive.
         for (const Deadline asks(Milliseconds{150}); !asks.passed(); std::this_thread::sleep_for(Milliseconds{5}))
           if (pending->done()) return;
         pending->wait();
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

/// What one rank does where the others make a call, and what they must say of it.
struct Misdeed {
  std::string name{};
  ErrorCode code{};
  std::vector<std::string> texts{};
  std::function<void(const std::shared_ptr<CommBackend>&)> run{};
  WorldOptions options = impatient();
};

Misdeed leaves_early() {
  return {"LeavesEarly", ErrorCode::kPeerLost, {"left early"}, [](const auto&) {}};
}

Misdeed aborts() {
  return {"Aborts", ErrorCode::kAborted, {"the loss is gone", "NONFINITE", "parameter w"}, [](const auto& backend) {
            backend->abort(Error(ErrorCode::kNonFinite, "the loss is gone", {.which = "parameter w"}));
          }};
}

/// Alive until all others have given up.
Misdeed never_calls() {
  Misdeed misdeed{"NeverCalls", ErrorCode::kTimeout, {"every peer is alive"}, [](const auto& backend) {
                    for (int rank = 0; rank + 1 < backend->size();) {
                      try {
                        backend->wait_until([] { return false; }, {.what = "the end of the others", .ranks = {rank}});
                      } catch (const Error& error) {
                        if (error.code() == ErrorCode::kPeerLost) ++rank;
                      }
                    }
                  }};
  misdeed.options.comm.timeout = Milliseconds{kSanitized ? 600 : 250};
  return misdeed;
}

/// From here on of processes.
Misdeed is_killed() {
  return {"IsKilled", ErrorCode::kPeerLost, {"SIGKILL (signal 9)", "pid "}, [](const auto&) { ::raise(SIGKILL); }};
}

Misdeed exits() {
  return {"Exits", ErrorCode::kPeerLost, {"exited with code 3"}, [](const auto&) { ::_exit(3); }};
}

Misdeed is_stopped() {
  Misdeed misdeed{
      "IsStopped", ErrorCode::kPeerLost, {"frozen", "process state T"}, [](const auto&) { ::raise(SIGSTOP); }};
  misdeed.options.meanwhile = [](const std::vector<pid_t>& pids, Milliseconds) {
    // The others have gone (and were collected): end the stopped one.
    for (std::size_t rank = 0; rank + 1 < pids.size(); ++rank) {
      if (::kill(pids[rank], 0) == 0) return true;
    }
    ::kill(pids.back(), SIGKILL);
    return false;
  };
  return misdeed;
}

/// The last rank does its misdeed where the others make the call; every other rank must end with the code and all
/// texts.
void expect_lost(const WorldParam& param, const Operation& operation, const Misdeed& misdeed) {
  SCOPED_TRACE(operation.name);
  const int culprit = param.size - 1;
  const RankReport report = run_world(
      param,
      [&](int rank, const std::shared_ptr<CommBackend>& backend) {
        const Communicator comm(backend);
        comm.barrier();
        if (rank == culprit) {
          misdeed.run(backend);
        } else {
          operation.run(comm);
          throw std::runtime_error("the call succeeded without a rank");
        }
      },
      misdeed.options);
  expect_prompt(report, culprit);
  for (int rank = 0; rank < culprit; ++rank) {
    const RankFailure* failure = report.of(rank);
    ASSERT_NE(failure, nullptr) << "rank " << rank << " saw nothing\n" << report.text();
    EXPECT_EQ(failure->code, misdeed.code) << failure->text;
    for (const std::string& text : misdeed.texts)
      EXPECT_NE(failure->text.find(text), std::string::npos) << failure->text;
    EXPECT_NE(failure->text.find("rank " + std::to_string(culprit)), std::string::npos) << failure->text;
    EXPECT_NE(failure->text.find(operation.name), std::string::npos) << failure->text;
  }
}

void expect_lost_in_every_call(const WorldParam& param, const Misdeed& misdeed) {
  for (const Operation& operation : operations()) expect_lost(param, operation, misdeed);
}

/// Worlds whose ranks see why one is missing, in every call.
std::vector<WorldParam> worlds_that_see() {
  std::vector<WorldParam> worlds = several_ranks();
  for (const WorldParam& world : several_ranks_of_nccl()) worlds.push_back(world);
  return worlds;
}

/// Any two of: backend, number of ranks, misdeed, call.
struct FaultRow {
  WorldParam world;
  std::size_t misdeed;
  std::size_t operation;
};

std::ostream& operator<<(std::ostream& out, const FaultRow& row) {
  return out << row.world << ", " << operations()[row.operation].name;
}

const std::vector<Misdeed>& misdeeds() {
  static const std::vector<Misdeed> all{leaves_early(), aborts(), never_calls(), is_killed(), exits(), is_stopped()};
  return all;
}

std::vector<FaultRow> fault_rows() {
  const std::vector<std::string> backends{"inproc", "shm", "inproc_on_gpu", "nccl_checked"};
  const std::vector<WorldParam> known = worlds_that_see();
  const auto row_of = [&](const FactorRow& row) {
    return FaultRow{{backends[static_cast<std::size_t>(row[0])], kSanitized ? 3 : row[1] + 2},
                    static_cast<std::size_t>(row[2]),
                    static_cast<std::size_t>(row[3])};
  };
  const auto valid = [&](const FactorRow& levels) {
    const FaultRow row = row_of(levels);
    const bool of_processes = row.misdeed >= 3;
    const bool is_known = std::ranges::any_of(known, [&](const WorldParam& world) {
      return world.backend == row.world.backend && world.size == row.world.size;
    });
    // Under sanitizers small and large calls by turns: one path each.
    const bool enough = !kSanitized || row.operation == 0 || row.operation >= kMatchedOperations ||
                        row.operation % 4 == 2 || row.operation % 4 == 3;
    return is_known && enough && runs_here(row.world) && (!of_processes || row.world.backend == "shm");
  };
  std::vector<FaultRow> rows;
  const std::vector<int> levels{static_cast<int>(backends.size()), kSanitized ? 1 : 3,
                                static_cast<int>(misdeeds().size()), static_cast<int>(operations().size())};
  for (const FactorRow& row : covering_array(levels, 2, valid)) rows.push_back(row_of(row));
  return rows;
}

std::string name_of_fault_row(const ::testing::TestParamInfo<FaultRow>& info) {
  std::string name = std::to_string(info.index) + "_" + info.param.world.backend + "_" +
                     std::to_string(info.param.world.size) + "_" + misdeeds()[info.param.misdeed].name + "_" +
                     operations()[info.param.operation].name;
  std::ranges::replace_if(name, [](unsigned char letter) { return std::isalnum(letter) == 0; }, '_');
  return name;
}

class FaultRows : public ::testing::TestWithParam<FaultRow> {};
INSTANTIATE_TEST_SUITE_P(Rows, FaultRows, ::testing::ValuesIn(fault_rows()), name_of_fault_row);

TEST_P(FaultRows, EveryOtherRankNamesTheRankAndTheCall) {
  expect_lost(GetParam().world, operations()[GetParam().operation], misdeeds()[GetParam().misdeed]);
}

class Faults : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Long, Faults, ::testing::ValuesIn(worlds_that_see()), name_of_param);

class ProcessFaults : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Long, ProcessFaults, ::testing::Values(WorldParam{"shm", 2}, WorldParam{"shm", 4}),
                         name_of_param);

TEST_P(Faults, ARankThatLeavesEarlyIsNamed) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_lost_in_every_call(GetParam(), leaves_early());
}

TEST_P(Faults, AnAbortReachesEveryWait) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_lost_in_every_call(GetParam(), aborts());
}

TEST_P(Faults, ARankThatNeverCallsIsATimeout) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_lost_in_every_call(GetParam(), never_calls());
}

class AbortFaults : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, AbortFaults, ::testing::ValuesIn(worlds_that_see()), name_of_param);

TEST_P(AbortFaults, AbortWakesASleeperAndIsFirstComeFirstServed) {
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
  expect_lost_in_every_call(GetParam(), is_killed());
}

TEST_P(ProcessFaults, AnExitWithoutGoodbyeIsNamedWithItsCode) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_lost_in_every_call(GetParam(), exits());
}

TEST_P(ProcessFaults, AStoppedRankIsFrozen) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_lost_in_every_call(GetParam(), is_stopped());
}

class MiddleFaults : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, MiddleFaults, ::testing::Values(WorldParam{"shm", 2}, WorldParam{"shm", 4}),
                         name_of_param);

TEST_P(MiddleFaults, ARankKilledInTheMiddleOfCalls) {
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
struct MessageMisdeed {
  std::string name{};
  std::set<ErrorCode> codes{};
  std::vector<std::string> texts{};
  std::function<void(const std::shared_ptr<CommBackend>&)> run{};
  WorldOptions options = impatient();
};

const std::vector<MessageMisdeed>& message_misdeeds() {
  static const std::vector<MessageMisdeed> all = [] {
    std::vector<MessageMisdeed> list{
        {"LeavesEarly", {ErrorCode::kPeerLost}, {}, [](const auto&) {}},
        {"Aborts", {ErrorCode::kAborted, ErrorCode::kPeerLost}, aborts().texts, aborts().run},
        {"NeverCalls", {ErrorCode::kTimeout, ErrorCode::kPeerLost}, {}, [](const auto&) {
           std::this_thread::sleep_for(Milliseconds{900});
         }}};
    list.back().options.comm.timeout = Milliseconds{kSanitized ? 600 : 250};
    return list;
  }();
  return all;
}

/// All other ranks end with one of the codes; at least one of them names the culprit, the call and these texts.
void expect_end(const WorldParam& param, const Operation& call, const MessageMisdeed& misdeed) {
  SCOPED_TRACE(call.name);
  const int culprit = param.size - 1;
  const RankReport report = run_world(
      param,
      [&](int rank, const std::shared_ptr<CommBackend>& backend) {
        const Communicator comm(backend);
        comm.barrier();
        if (rank == culprit) return misdeed.run(backend);
        call.run(comm);
        comm.barrier();
        throw std::runtime_error("two calls succeeded without a rank");
      },
      misdeed.options);
  int naming = 0;
  for (int rank = 0; rank < culprit; ++rank) {
    const RankFailure* failure = report.of(rank);
    ASSERT_NE(failure, nullptr) << "rank " << rank << " saw nothing\n" << report.text();
    ASSERT_TRUE(failure->code.has_value()) << failure->text;
    EXPECT_TRUE(misdeed.codes.contains(*failure->code)) << failure->text;
    const auto says = [&](const std::string& text) { return failure->text.find(text) != std::string::npos; };
    const bool names_call = says(call.name) || says("barrier");
    // In levels it is rank 1 of node 1.
    const bool names_rank =
        says("rank " + std::to_string(culprit)) || (param.per_node > 0 && says("of node 1; ") && says("from rank 1"));
    naming += names_rank && names_call && std::ranges::all_of(misdeed.texts, says) ? 1 : 0;
  }
  EXPECT_GE(naming, 1) << report.text();
}

std::vector<WorldParam> worlds_of_streams() {
  return {{"sockets", 2}, {"sockets", 3}, {"shm+sockets", 4, 2}, {"nccl", 3}};
}

std::vector<FaultRow> message_rows() {
  const std::vector<WorldParam> worlds = worlds_of_streams();
  const auto valid = [&](const FactorRow& row) {
    const WorldParam& world = worlds[static_cast<std::size_t>(row[0])];
    return runs_here(world) && (!kSanitized || ((world.size > 2 || row[0] > 0) && (row[2] == 0 || row[2] % 4 == 2)));
  };
  std::vector<FaultRow> rows;
  const std::vector<int> levels{static_cast<int>(worlds.size()), static_cast<int>(message_misdeeds().size()),
                                static_cast<int>(kMatchedOperations)};
  for (const FactorRow& row : covering_array(levels, 2, valid))
    rows.push_back(
        {worlds[static_cast<std::size_t>(row[0])], static_cast<std::size_t>(row[1]), static_cast<std::size_t>(row[2])});
  return rows;
}

class MessageFaultRows : public ::testing::TestWithParam<FaultRow> {};
INSTANTIATE_TEST_SUITE_P(Rows, MessageFaultRows, ::testing::ValuesIn(message_rows()), name_of_fault_row);

TEST_P(MessageFaultRows, OneRankAtLeastNamesTheRankAndTheCall) {
  expect_end(GetParam().world, operations()[GetParam().operation], message_misdeeds()[GetParam().misdeed]);
}

class MessageFaults : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Long, MessageFaults, ::testing::ValuesIn(worlds_of_streams()), name_of_param);

void expect_end_in_every_call(const WorldParam& param, const MessageMisdeed& misdeed) {
  const std::vector<Operation> calls = operations();
  for (std::size_t index = 0; index < kMatchedOperations; ++index) expect_end(param, calls[index], misdeed);
}

TEST_P(MessageFaults, ARankThatLeavesEarlyIsNamed) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_end_in_every_call(GetParam(), message_misdeeds()[0]);
}

TEST_P(MessageFaults, AnAbortReachesEveryWait) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_end_in_every_call(GetParam(), message_misdeeds()[1]);
}

TEST_P(MessageFaults, ARankThatNeverCallsIsATimeout) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  expect_end_in_every_call(GetParam(), message_misdeeds()[2]);
}

/// One rank dies inside a call that all have begun: by the failpoint between the agreement about the call and its data,
/// and for large data over shared memory between two rounds. As gloo's tests kill in every collective, here on every
/// transport between processes.
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

std::vector<std::string> inside(const WorldParam& param, std::size_t operation) {
  return inside(param, operations()[operation], operation > 0 && operation % 2 == 0);
}

void expect_end_after_kill(const WorldParam& param, const Operation& call, const std::string& site, int victim) {
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

std::vector<WorldParam> worlds_of_processes() {
  return {{"shm", 2}, {"shm", 3}, {"staged", 3}, {"sockets", 2}, {"sockets", 3}, {"shm+sockets", 4, 2}};
}

/// Any two of: backend, number of ranks, call, failpoint inside it, first or last rank.
struct KillRow {
  WorldParam world;
  std::size_t operation;
  std::string site;
  int victim;
};

std::ostream& operator<<(std::ostream& out, const KillRow& row) {
  return out << row.world << ", " << operations()[row.operation].name << " at " << row.site;
}

std::vector<KillRow> kill_rows() {
  const std::vector<std::string> backends{"shm", "staged", "sockets", "shm+sockets"};
  const auto world_of = [&](const FactorRow& row) {
    for (const WorldParam& world : worlds_of_processes()) {
      if (world.backend == backends[static_cast<std::size_t>(row[0])] && world.size == row[1] + 2) return world;
    }
    return WorldParam{"self", 1};
  };
  const auto valid = [&](const FactorRow& row) {
    const WorldParam world = world_of(row);
    const bool enough = !kSanitized || (world.size > 2 && (row[2] == 0 || row[2] % 4 == 2));
    return world.size > 1 && enough && runs_here(world) &&
           static_cast<std::size_t>(row[3]) < inside(world, static_cast<std::size_t>(row[2])).size();
  };
  std::vector<KillRow> rows;
  const std::vector<int> levels{static_cast<int>(backends.size()), 3, static_cast<int>(kMatchedOperations), 3, 2};
  for (const FactorRow& row : covering_array(levels, 2, valid)) {
    const WorldParam world = world_of(row);
    const auto operation = static_cast<std::size_t>(row[2]);
    rows.push_back({world, operation, inside(world, operation)[static_cast<std::size_t>(row[3])],
                    row[4] == 0 ? 0 : world.size - 1});
  }
  return rows;
}

std::string name_of_kill_row(const ::testing::TestParamInfo<KillRow>& info) {
  const KillRow& row = info.param;
  std::string name = std::to_string(info.index) + "_" + row.world.backend + "_" + std::to_string(row.world.size) + "_" +
                     operations()[row.operation].name + "_at_" + row.site + "_rank" + std::to_string(row.victim);
  std::ranges::replace_if(name, [](unsigned char letter) { return std::isalnum(letter) == 0; }, '_');
  return name;
}

class KilledInsideRows : public ::testing::TestWithParam<KillRow> {};
INSTANTIATE_TEST_SUITE_P(Rows, KilledInsideRows, ::testing::ValuesIn(kill_rows()), name_of_kill_row);
// Under the thread sanitizer no process is forked.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KilledInsideRows);

TEST_P(KilledInsideRows, EveryOtherRankEndsWithBothNames) {
  const KillRow& row = GetParam();
  expect_end_after_kill(row.world, operations()[row.operation], row.site, row.victim);
}

class KilledInside : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Long, KilledInside, ::testing::ValuesIn(worlds_of_processes()), name_of_param);

TEST_P(KilledInside, EachCallEndsOnEveryOtherRankWithBothNames) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const WorldParam& param = GetParam();
  for (std::size_t operation = 0; operation < kMatchedOperations; ++operation) {
    for (const std::string& site : inside(param, operation)) {
      for (const int victim : {0, param.size - 1}) expect_end_after_kill(param, operations()[operation], site, victim);
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
