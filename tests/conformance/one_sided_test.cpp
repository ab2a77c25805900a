// Windows, waiting and ringing: what a gather by pulling is made of.
#include "conformance/world_runner.h"

#include <zeroth/comm/decorators.h>

#include <time.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace zeroth::test {
namespace {

class OneSided : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, OneSided, ::testing::ValuesIn(all_worlds()), name_of_param);

/// An arena of one page of flags and data behind it, attached by all ranks.
class Board {
 public:
  explicit Board(CommBackend& backend, std::size_t data_bytes = kPageBytes)
      : arena_(Arena::create(backend.capabilities().window_kind, kPageBytes + data_bytes, "board")),
        window_(backend.attach(arena_, "board")) {}

  [[nodiscard]] std::atomic_ref<std::uint64_t> flag(int rank, std::size_t index = 0) const {
    auto* words = reinterpret_cast<std::uint64_t*>(window_.ranks[static_cast<std::size_t>(rank)].data());
    return std::atomic_ref<std::uint64_t>(words[index * 16]);
  }
  [[nodiscard]] std::byte* data(int rank) const {
    return window_.ranks[static_cast<std::size_t>(rank)].data() + kPageBytes;
  }
  [[nodiscard]] const PeerWindow& window() const { return window_; }

 private:
  Arena arena_;
  PeerWindow window_;
};

TEST_P(OneSided, EpochsCarryData) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    constexpr std::size_t kBytes = 20'000;
    const Communicator comm(backend);
    const Board board(*backend, kBytes);
    for (std::uint64_t epoch = 1; epoch <= 200; ++epoch) {
      std::memset(board.data(rank), static_cast<int>((epoch + static_cast<std::uint64_t>(rank)) % 251), kBytes);
      board.flag(rank).store(epoch);
      backend->notify();
      for (int peer = 0; peer < comm.size(); ++peer) {
        backend->wait_until([&] { return board.flag(peer).load() >= epoch; }, {.what = "an epoch", .ranks = {peer}});
        const auto expected = static_cast<std::byte>((epoch + static_cast<std::uint64_t>(peer)) % 251);
        require(board.data(peer)[0] == expected && board.data(peer)[kBytes - 1] == expected, "torn or old data");
      }
      comm.barrier();  // the commit vote: nobody overwrites before all have read
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(OneSided, NoWakeUpIsLost) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  // A token goes round; every hop is a sleep and a ring. A lost wake-up would cost a slice of 100 ms each,
  // and 3,000 of them the deadline.
  WorldOptions options;
  options.comm.spin = std::chrono::microseconds{0};
  const RankReport report = run_world(
      GetParam(),
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        const Board board(*backend);
        const auto size = static_cast<std::uint64_t>(backend->size());
        for (std::uint64_t hop = static_cast<std::uint64_t>(rank); hop < 3000; hop += size) {
          if (hop > 0) backend->wait_until([&] { return board.flag(0).load() == hop; }, {.what = "the token"});
          board.flag(0).store(hop + 1);
          backend->notify();
        }
        Communicator(backend).barrier();
      },
      options);
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(OneSided, ThePredicateMayWorkAndThrow) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
    int steps = 0;
    backend->wait_until([&] { return ++steps >= 3; }, {.what = "own progress"});
    require(steps == 3, "called once too often");
    try {
      backend->wait_until([]() -> bool { throw std::runtime_error("from the predicate"); }, {.what = "nothing"});
    } catch (const Error&) {
      throw;
    } catch (const std::runtime_error& error) {
      require(std::string(error.what()) == "from the predicate", error.what());
      return;
    }
    throw std::runtime_error("the exception was swallowed");
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(OneSided, WindowsMayDifferInSizeAndBeEmpty) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const ArenaKind kind = backend->capabilities().window_kind;
    const Arena arena = Arena::create(kind, static_cast<std::size_t>(rank) * 10'000, "uneven");
    const PeerWindow window = backend->attach(arena, "uneven");
    require(window.ranks.size() == static_cast<std::size_t>(backend->size()), "number of windows");
    for (std::size_t peer = 0; peer < window.ranks.size(); ++peer) {
      require(window.ranks[peer].size() == align_up(peer * 10'000, kPageBytes), "size of a window");
    }
    if (rank > 0)
      require(window.ranks[static_cast<std::size_t>(rank)].data() == arena.data(), "the own window is the arena");
    Communicator(backend).barrier();
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(OneSided, AWindowOutlivesTheGroup) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    std::vector<PeerWindow> kept;
    {
      const std::shared_ptr<CommBackend> part = backend->split(0, rank, "part");
      const Board board(*part);
      board.flag(rank).store(static_cast<std::uint64_t>(rank) + 100);
      Communicator(part).barrier();
      kept.push_back(board.window());
    }
    Communicator(backend).barrier();
    for (int peer = 0; peer < backend->size(); ++peer) {
      const auto* word = reinterpret_cast<const std::uint64_t*>(kept[0].ranks[static_cast<std::size_t>(peer)].data());
      require(*word == static_cast<std::uint64_t>(peer) + 100, "the mapping has gone");
    }
    Communicator(backend).barrier();
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(OneSided, CountedBytesReachTheTable) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const auto table = std::make_shared<TrafficTable>();
    backend->set_observer(table);
    const Communicator comm(backend);
    const auto n = static_cast<std::uint64_t>(comm.size());
    backend->count_one_sided(CollectiveKind::kAllGather, 0, 1000);
    backend->count_one_sided(CollectiveKind::kAllGather, 0, 24);
    std::vector<float> data(1000 * n);
    std::vector<float> part(1000);
    comm.reduce_scatter(std::span<const float>(data), std::span(part));  // inline or staged, by size
    comm.all_gather(std::span<const float>(part), std::span(data));
    comm.all_reduce(std::span(data));
    comm.broadcast(std::span(data), 0);
    comm.barrier();
    const std::uint64_t total = 4000 * n;
    require(table->row(CollectiveKind::kAllGather).one_sided_bytes == 1024, "one-sided bytes");
    require(table->row("world", CollectiveKind::kAllGather).one_sided_calls == 2, "one-sided calls");
    require(table->row(CollectiveKind::kReduceScatter).bytes == total / n * (n - 1), "reduce_scatter");
    require(table->row(CollectiveKind::kAllGather).bytes == total / n * (n - 1), "all_gather");
    require(table->row(CollectiveKind::kBroadcast).bytes == (rank == 0 ? 0 : total), "broadcast");
    require(table->row(CollectiveKind::kBarrier) == TrafficRow{.calls = 1}, "barrier");
    // All ranks together, because the parts of an all_reduce are cut at cache lines.
    auto received = static_cast<std::int64_t>(table->row(CollectiveKind::kAllReduce).bytes);
    comm.all_reduce(std::span(&received, 1));
    const std::uint64_t reduced = total <= 8192 ? total * (n - 1) * n : 2 * total * (n - 1);
    require(static_cast<std::uint64_t>(received) == reduced,
            "all_reduce: " + std::to_string(received) + " instead of " + std::to_string(reduced));
    require(table->control_bytes() > 0 || n == 1, "control bytes");
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(OneSided, AWaitingRankSleeps) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Board board(*backend);
    if (rank == 0) {  // in a world of one nobody waits
      std::this_thread::sleep_for(Milliseconds{600});
      board.flag(0).store(1);
      backend->notify();
      return;
    }
    const auto cpu_ms = [] {
      timespec used{};
      ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
      return used.tv_sec * 1000 + used.tv_nsec / 1'000'000;
    };
    const auto before = cpu_ms();
    backend->wait_until([&] { return board.flag(0).load() == 1; }, {.what = "the late rank", .ranks = {0}});
    // Processor time, not wall time: load on the machine only makes it smaller.
    require(cpu_ms() - before < 100, "a waiting rank burns its core");
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

}  // namespace
}  // namespace zeroth::test
