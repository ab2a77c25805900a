// What a rank owes to others is done in every wait, over each transport that threads have.
#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/comm/progress.h>

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

class Owed final : public Progress {
 public:
  explicit Owed(std::function<void()> work = {}, std::function<void()> sleeps = {})
      : work_(std::move(work)), sleeps_(std::move(sleeps)) {}
  bool advance() override {
    ++advances;
    if (work_) work_();
    return true;
  }
  void set_awaited(int rank) override {
    awaits = true;
    last_awaited = rank;
    if (sleeps_) sleeps_();
  }
  void clear_awaited() noexcept override { awaits = false; }

  int advances = 0;
  bool awaits = false;
  int last_awaited = Progress::kAnyRank;

 private:
  std::function<void()> work_;
  std::function<void()> sleeps_;
};

struct Transport {
  const char* name;
  ThreadTransport transport;
  int per_node;
};

class ProgressOf : public ::testing::TestWithParam<Transport> {
 protected:
  [[nodiscard]] static RankReport run(const RankBody& body, bool abort_on_failure = true,
                                      Milliseconds timeout = quick_options().timeout) {
    ThreadRanksOptions options{.abort_on_failure = abort_on_failure, .transport = GetParam().transport};
    options.comm.timeout = timeout;
    options.comm.nodes = nodes_of_ranks(4, GetParam().per_node);
    return try_ranks(4, body, options);
  }
};
INSTANTIATE_TEST_SUITE_P(Transports, ProgressOf,
                         ::testing::Values(Transport{"memory", ThreadTransport::kMemory, 0},
                                           Transport{"messages", ThreadTransport::kMessages, 0},
                                           Transport{"levels", ThreadTransport::kLevels, 2},
                                           Transport{"mixed", ThreadTransport::kMixed, 0}),
                         [](const auto& chosen) { return std::string(chosen.param.name); });

/// Sums of few and of many bytes, exchanges and messages, in a group and in one that was split before.
TEST_P(ProgressOf, EveryWaitOfEveryGroup) {
  std::array<std::atomic<int>, 4> slept{};  // the last call in which each rank has slept
  const RankReport report = run([&](int rank, const std::shared_ptr<CommBackend>& backend) {
    const std::shared_ptr<CommBackend> part = backend->split(0, rank, "part");
    int calls = 0;
    const auto owed = std::make_shared<Owed>(nullptr, [&] { slept.at(static_cast<std::size_t>(rank)) = calls; });
    require(backend->add_progress(owed) == rank, "the number of this rank");
    // Rank 3 comes when these wait for it, however late they are themselves.
    const auto come_after = [&](const std::vector<int>& others) {
      const Deadline deadline(Milliseconds{10'000});
      for (const int other : others) {
        while (slept.at(static_cast<std::size_t>(other)) < calls && !deadline.passed())
          std::this_thread::sleep_for(Milliseconds{1});
      }
    };
    const auto expect_progress = [&](const std::string& what, const std::function<void()>& call) {
      const int before = owed->advances;
      ++calls;
      if (rank == 3) come_after({0, 1, 2});
      call();
      require(rank == 3 || owed->advances > before, "no progress in " + what);
      require(!owed->awaits, "still awaits somebody after " + what);
    };
    for (const std::shared_ptr<CommBackend>& group : {backend, part}) {
      const Communicator comm(group);
      for (const std::size_t elements : {std::size_t{4}, std::size_t{4'096}, std::size_t{40'000}}) {
        std::vector<float> data(elements, 1.0F);
        std::vector<float> other(elements);
        expect_progress("a sum", [&] { comm.all_reduce(std::span(data)); });
        expect_progress("an exchange", [&] { comm.all_to_all(std::span<const float>(data), std::span(other)); });
        comm.barrier();
        ++calls;
        if (rank == 3) come_after({0});
        if (rank == 3) comm.send(std::span<const float>(data), 0);
        const int before = owed->advances;
        if (rank == 0) comm.recv(std::span(other), 3);
        require(rank != 0 || owed->advances > before, "no progress in a message");
        require(rank != 0 || owed->last_awaited == 3, "awaits another rank than the sender");
      }
      expect_progress("a barrier", [&] { comm.barrier(); });
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

/// Rank 0 must do something inside a call before rank 1 comes to it.
TEST_P(ProgressOf, ADebtIsPaidInsideACall) {
  std::atomic<bool> paid{false};
  const RankReport report = run([&](int rank, const std::shared_ptr<CommBackend>& backend) {
    const auto owed = std::make_shared<Owed>([&] { paid.store(paid.load() || rank == 0); });
    (void)backend->add_progress(owed);
    const Deadline deadline(Milliseconds{10'000});
    while (rank == 1 && !paid.load() && !deadline.passed()) std::this_thread::sleep_for(Milliseconds{1});
    require(rank != 1 || paid.load(), "nobody has paid");
    Communicator(backend).barrier();
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

/// It need not be taken away, and what is gone is not called.
TEST_P(ProgressOf, NothingIsOwedAfterwards) {
  const RankReport report = run([](int rank, const std::shared_ptr<CommBackend>& backend) {
    auto owed = std::make_shared<Owed>();
    (void)backend->add_progress(owed);
    (void)backend->add_progress(owed);  // a second time it does nothing
    const std::weak_ptr<Owed> gone = owed;
    owed.reset();
    require(gone.expired(), "somebody keeps it");
    if (rank == 1) std::this_thread::sleep_for(Milliseconds{50});
    Communicator(backend).barrier();
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

/// An error ends the wait in which it comes up, in its own words.
// Messages that tell of no abort leave rank 1 waiting in vain: it gets a short deadline.
TEST_P(ProgressOf, AnErrorIsTheCallersOnce) {
  std::atomic<int> thrown{0};
  const RankReport report = run(
      [&](int rank, const std::shared_ptr<CommBackend>& backend) {
        const auto owed = std::make_shared<Owed>([&] {
          if (rank != 0) return;
          ++thrown;
          throw Error(ErrorCode::kMismatch, "ranks have other layouts",
                      {.where = "zero.reduce", .which = "unit block.3"});
        });
        (void)backend->add_progress(owed);
        if (rank == 1) std::this_thread::sleep_for(Milliseconds{100});
        Communicator(backend).barrier();
      },
      /*abort_on_failure=*/true, Milliseconds{3'000});
  EXPECT_EQ(thrown.load(), 1);
  bool found = false;
  for (const RankFailure& failure : report.failures) {
    if (failure.rank != 0) continue;
    found = true;
    EXPECT_EQ(failure.code, ErrorCode::kMismatch);
    EXPECT_NE(failure.text.find("ranks have other layouts"), std::string::npos) << failure.text;
    EXPECT_NE(failure.text.find("unit block.3"), std::string::npos) << failure.text;
    EXPECT_NE(failure.text.find("zero.reduce"), std::string::npos) << failure.text;
  }
  EXPECT_TRUE(found) << report.text();
}

}  // namespace
}  // namespace zeroth::test
