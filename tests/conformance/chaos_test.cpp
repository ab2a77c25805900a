// Luck against the transport: random delays, streams in chaos mode, ranks that are stopped and continued.
// Values must hold. `make test` draws a quarter of the seeds and calls of the long tier.
#include "comm/decorators/faulty_backend.h"
#include "conformance/world_runner.h"
#include "support/sanitizer.h"
#include "support/tier.h"

#include <zeroth/comm/decorators.h>
#include <zeroth/device/device.h>

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <random>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

/// A few calls of random kinds and sizes, the same on all ranks; checks every result.
void random_calls(const std::shared_ptr<CommBackend>& backend, std::uint64_t seed, int calls, std::size_t largest) {
  const Communicator comm(backend);
  const auto size = static_cast<std::size_t>(comm.size());
  const auto rank = static_cast<std::size_t>(comm.rank());
  std::mt19937_64 random(seed);  // the same stream of numbers on every rank
  for (int call = 0; call < calls; ++call) {
    const std::uint64_t kind = random() % 9;
    const std::size_t part = random() % (random() % 4 == 0 ? largest : 40);
    const auto base = static_cast<std::int64_t>(random() % 1000);
    const MessageTag tag{.unit = static_cast<std::int32_t>(random() % 5), .label = static_cast<std::uint32_t>(call)};
    const std::string where = "seed " + std::to_string(seed) + " call " + std::to_string(call);
    const std::int64_t rank_sum = static_cast<std::int64_t>(size * (size - 1) / 2);
    if (kind == 0) {
      std::vector<std::int64_t> data(part, base + static_cast<std::int64_t>(rank));
      comm.all_reduce(std::span(data), tag);
      for (const std::int64_t value : data) {
        if (value != base * comm.size() + rank_sum) require(false, "all_reduce " + where);
      }
    } else if (kind == 1) {
      const std::vector<std::int32_t> own(part, static_cast<std::int32_t>(base) + comm.rank());
      std::vector<std::int32_t> all(part * size);
      comm.all_gather(std::span<const std::int32_t>(own), std::span(all), tag);
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (all[i] != static_cast<std::int32_t>(base) + static_cast<std::int32_t>(i / part))
          require(false, "all_gather " + where);
      }
    } else if (kind == 2) {
      std::vector<double> in(part * size);
      for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<double>(i + rank);
      std::vector<double> own(part);
      comm.reduce_scatter(std::span<const double>(in), std::span(own), tag);
      for (std::size_t i = 0; i < part; ++i) {
        const double expected = static_cast<double>((rank * part + i) * size) + static_cast<double>(rank_sum);
        if (own[i] != expected) require(false, "reduce_scatter " + where);
      }
    } else if (kind == 3) {
      const int root = static_cast<int>(random() % size);
      std::vector<std::uint8_t> data(part, static_cast<std::uint8_t>(comm.rank() == root ? base : 77));
      comm.broadcast(std::span(data), root, tag);
      for (const std::uint8_t value : data) {
        if (value != static_cast<std::uint8_t>(base)) require(false, "broadcast " + where);
      }
    } else if (kind == 4) {
      const int root = static_cast<int>(random() % size);
      const bool here = comm.rank() == root;
      std::vector<std::int32_t> own(part, static_cast<std::int32_t>(base) + comm.rank());
      std::vector<std::int32_t> all(here ? part * size : 0);
      comm.gather(std::span<const std::int32_t>(own), std::span(all), root, tag);
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (all[i] != static_cast<std::int32_t>(base) + static_cast<std::int32_t>(i / part))
          require(false, "gather " + where);
        all[i] += 1;
      }
      comm.scatter(std::span<const std::int32_t>(all), std::span(own), root, tag);
      for (const std::int32_t value : own) {
        if (value != static_cast<std::int32_t>(base) + comm.rank() + 1) require(false, "scatter " + where);
      }
    } else if (kind == 5 || kind == 6) {
      // Rank r gives rank q r + q + part elements, or none: counts that only the two of them know.
      const auto length = [&](std::size_t from, std::size_t to) {
        return (from + to + call) % 3 == 0 ? 0 : from + to + part;
      };
      std::vector<std::int64_t> counts;
      std::vector<std::int64_t> recv_counts;
      std::vector<std::int64_t> in;
      std::vector<std::int64_t> expected;
      const auto value = [&](std::size_t from, std::size_t to) {
        return base + static_cast<std::int64_t>(100 * from + to);
      };
      for (std::size_t peer = 0; peer < size; ++peer) {
        counts.push_back(static_cast<std::int64_t>(length(rank, peer)));
        recv_counts.push_back(static_cast<std::int64_t>(length(peer, rank)));
        in.insert(in.end(), length(rank, peer), value(rank, peer));
        expected.insert(expected.end(), length(peer, rank), value(peer, rank));
      }
      std::vector<std::int64_t> out(expected.size());
      comm.all_to_all(std::span<const std::int64_t>(in), std::span(out), counts, recv_counts, tag);
      require(out == expected, "all_to_all " + where);
    } else if (kind == 7 && size > 1) {
      const std::size_t step = 1 + random() % (size - 1);
      const std::vector<std::int64_t> out(part, base + comm.rank());
      std::vector<std::int64_t> in(part);
      const std::size_t from = (rank + size - step) % size;
      const Collective both[] = {
          comm.send_call(std::span<const std::int64_t>(out), static_cast<int>((rank + step) % size), tag),
          comm.recv_call(std::span(in), static_cast<int>(from), tag)};
      comm.batch(both);
      for (const std::int64_t value : in) {
        if (value != base + static_cast<std::int64_t>(from)) require(false, "recv " + where);
      }
    } else {
      comm.barrier(tag);
    }
  }
}

void expect_values_with_random_delays(int seeds) {
  for (int seed = 0; seed < seeds; ++seed) {
    const int world = std::vector<int>{2, 3, 4, 7}[static_cast<std::size_t>(seed) % 4];
    const RankReport report = try_ranks(world, [&](int rank, const std::shared_ptr<CommBackend>& backend) {
      (void)rank;
      // The backend inside the decorator belongs to the harness: wrap a part of it.
      const std::shared_ptr<CommBackend> faulty = std::make_shared<FaultyBackend>(
          backend->split(0, backend->rank(), "faulty"), FaultPlan{.seed = static_cast<std::uint64_t>(seed),
                                                                  .delay_probability = 0.2,
                                                                  .max_delay = std::chrono::microseconds{100}});
      random_calls(faulty, static_cast<std::uint64_t>(seed), 12, 5000);
    });
    ASSERT_TRUE(report.ok()) << "seed " << seed << "\n" << report.text();
  }
}

TEST(Chaos, SeedsOfThreadsWithRandomDelays) {
  expect_values_with_random_delays(kSanitized ? 100 : 250);
}

TEST(LongChaos, AThousandSeedsOfThreadsWithRandomDelays) {
  expect_values_with_random_delays(1'000);
}

std::vector<WorldParam> worlds_of_two_backends() {
  if (mpi_world_size() > 0) return {{"shm|mpi", mpi_world_size()}};
  return {{"mixed", 2}, {"mixed", 4}};
}
class ChaosOverTwoBackends : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, ChaosOverTwoBackends, ::testing::ValuesIn(worlds_of_two_backends()), name_of_param);
INSTANTIATE_TEST_SUITE_P(Long, ChaosOverTwoBackends, ::testing::ValuesIn(worlds_of_two_backends()), name_of_param);

TEST_P(ChaosOverTwoBackends, ThousandsOfCalls) {
  const int calls = in_long_tier() ? 10'000 : (kSanitized ? 1'000 : 2'500);
  const RankReport report = run_world(GetParam(), [calls](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
    random_calls(backend, static_cast<std::uint64_t>(backend->size()), calls, 20'000);
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

class ChaosStreams : public ::testing::TestWithParam<ThreadTransport> {};
INSTANTIATE_TEST_SUITE_P(Transports, ChaosStreams, ::testing::Values(ThreadTransport::kMemory, ThreadTransport::kMixed),
                         [](const auto& given) {
                           return std::string(given.param == ThreadTransport::kMemory ? "Memory" : "Mixed");
                         });

TEST_P(ChaosStreams, CallsOnSeveralStreamsKeepProgramOrder) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const RankReport report = try_ranks(
        3,
        [&](int rank, const std::shared_ptr<CommBackend>& backend) {
          const auto device = make_cpu_device(ExecutionMode::kChaos, seed * 10 + static_cast<std::uint64_t>(rank));
          const std::vector<Stream> streams{device->make_stream("gather"), device->make_stream("reduce"),
                                            device->make_stream("host")};
          const Communicator comm(backend);
          std::vector<std::vector<std::int64_t>> data;
          std::vector<Work> works;
          for (std::size_t call = 0; call < 20; ++call) data.emplace_back(50 * call, rank + 1);
          for (std::size_t call = 0; call < data.size(); ++call) {
            // The stream is each rank's own choice: order is that of the program all the same.
            const Stream& stream = streams[(call * 7 + seed + static_cast<std::size_t>(rank)) % streams.size()];
            works.push_back(comm.all_reduce_async(std::span<const std::int64_t>(data[call]), std::span(data[call]),
                                                  stream, {.unit = static_cast<std::int32_t>(call), .label = 0}));
          }
          works.back().wait();
          for (const Work& work : works) work.wait();
          for (const auto& values : data) {
            for (const std::int64_t value : values) require(value == 6, "wrong sum");
          }
        },
        {.transport = GetParam()});
    ASSERT_TRUE(report.ok()) << "seed " << seed << "\n" << report.text();
  }
}

/// The same calls in processes: one start, a group of its own for each seed.
void random_calls_of_seeds(const std::shared_ptr<CommBackend>& backend, int seeds, int calls, std::size_t largest) {
  for (int seed = 0; seed < seeds; ++seed) {
    const FaultPlan plan{.seed = static_cast<std::uint64_t>(seed),
                         .delay_probability = 0.2,
                         .max_delay = std::chrono::microseconds{200}};
    const std::string name = "seed" + std::to_string(seed);
    const std::shared_ptr<CommBackend> faulty =
        std::make_shared<FaultyBackend>(backend->split(0, backend->rank(), name), plan);
    random_calls(faulty, plan.seed, calls, largest);
  }
}

/// Ranks that mpirun has started, threads that send messages, and threads with GPUs.
std::vector<WorldParam> worlds_of_seeds() {
  std::vector<WorldParam> worlds = several_worlds_with_messages();
  if (started_worlds().empty())
    worlds.insert(worlds.end(), {{"nccl", 3}, {"nccl", 4}, {"nccl_checked", 3}, {"inproc_on_gpu", 3}});
  return worlds;
}
class ChaosOverMessages : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, ChaosOverMessages, ::testing::ValuesIn(worlds_of_seeds()), name_of_param);
INSTANTIATE_TEST_SUITE_P(Long, ChaosOverMessages, ::testing::ValuesIn(worlds_of_seeds()), name_of_param);

TEST_P(ChaosOverMessages, SeedsWithRandomDelays) {
  const int seeds = in_long_tier() ? 100 : 25;
  const RankReport report = run_world(GetParam(), [seeds](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
    random_calls_of_seeds(backend, seeds, 12, 5000);
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST(Chaos, AHundredSeedsOfProcessesWithRandomDelays) {
  if (kThreadSanitizer) GTEST_SKIP() << "not under sanitizers: forked ranks";
  for (const int size : {2, 3, 4}) {
    const RankReport report = run_world({"shm", size}, [](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
      random_calls_of_seeds(backend, 100, 12, 5000);
    });
    EXPECT_TRUE(report.ok()) << size << " ranks\n" << report.text();
  }
}

TEST(Chaos, StoppedAndContinuedProcesses) {
  if (kThreadSanitizer) GTEST_SKIP() << "not under sanitizers: forked ranks";
  constexpr int kSeeds = kSanitized ? 8 : 25;
  for (const int size : {2, 3, 4}) {
    std::mt19937_64 random(static_cast<std::uint64_t>(size));
    std::size_t stopped = SIZE_MAX;
    WorldOptions options;
    options.meanwhile = [&](const std::vector<pid_t>& pids, Milliseconds) {
      // Until the end: a rank that is stopped is continued at the next look, some milliseconds later.
      if (stopped != SIZE_MAX) ::kill(pids[stopped], SIGCONT);
      stopped = random() % pids.size();
      if (::kill(pids[stopped], 0) != 0) return false;  // collected
      ::usleep(static_cast<useconds_t>(random() % 2'000));
      ::kill(pids[stopped], SIGSTOP);
      return true;
    };
    const RankReport report = run_world(
        {"shm", size},
        [](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
          for (std::uint64_t seed = 0; seed < kSeeds; ++seed) random_calls(backend, seed, 80, 60'000);
        },
        options);
    EXPECT_TRUE(report.ok()) << size << " ranks\n" << report.text();
  }
}

}  // namespace
}  // namespace zeroth::test
