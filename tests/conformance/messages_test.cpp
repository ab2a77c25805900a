// What a backend over messages promises beside the common suite.
#include "support/message_hub.h"
#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/comm/messages.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::HasSubstr;

ThreadRanksOptions over_messages(Milliseconds timeout = Milliseconds{30'000}) {
  ThreadRanksOptions options;
  options.transport = ThreadTransport::kMessages;
  options.abort_on_failure = false;
  options.comm.timeout = timeout;
  return options;
}

TEST(Messages, AWaitThatTakesTooLongNamesTheCallAndTheRank) {
  const RankReport report = try_ranks(
      2,
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        if (rank == 1) return std::this_thread::sleep_for(Milliseconds{700});
        backend->set_tag_names(
            {.name = [](const MessageTag& tag) { return "the gradients of unit " + std::to_string(tag.unit); },
             .hint = {}});
        const Communicator comm(backend);
        std::vector<float> data(5);
        for (int attempt = 0; attempt < 2; ++attempt) {  // a broken group stays broken
          try {
            comm.all_reduce(std::span(data), {.unit = 3});
            throw std::runtime_error("a sum of one rank");
          } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::kTimeout);
            EXPECT_THAT(error.what(),
                        HasSubstr("all_reduce#0 float32, 5 elements (20 B), unit 3, label 0 from rank 1"));
            EXPECT_THAT(error.what(), HasSubstr("which: the gradients of unit 3"));
          }
        }
      },
      over_messages(Milliseconds{300}));
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST(Messages, AbortEndsTheWaitsOfThisRank) {
  const RankReport report = try_ranks(
      2,
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        if (rank == 1) return std::this_thread::sleep_for(Milliseconds{500});
        std::thread other([&] {
          std::this_thread::sleep_for(Milliseconds{100});
          backend->abort(Error(ErrorCode::kIo, "the disk is full"));
        });
        try {
          Communicator(backend).barrier();
          ADD_FAILURE() << "a barrier of one rank";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kAborted);
          EXPECT_THAT(error.what(), HasSubstr("the disk is full"));
        }
        other.join();
      },
      over_messages());
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST(Messages, GroupsOfTheSameRanksDoNotMix) {
  run_ranks(
      4,
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        const std::shared_ptr<CommBackend> pair = backend->split(rank / 2, rank, "pair");
        const std::shared_ptr<CommBackend> twin = backend->split(rank / 2, -rank, "twin");
        const std::shared_ptr<CommBackend> inner = pair->split(0, rank, "inner");
        EXPECT_EQ(twin->rank(), 1 - pair->rank());
        EXPECT_EQ(inner->group_name(), "world/pair/inner");
        const Communicator groups[] = {Communicator(backend), Communicator(pair), Communicator(twin),
                                       Communicator(inner)};
        for (int round = 0; round < 20; ++round) {
          // Lower and upper pair are at different groups at the same time.
          for (int index = 0; index < 3; ++index) {
            const Communicator& group = groups[rank < 2 ? 1 + index : 3 - index];
            std::vector<std::int64_t> data{rank, round};
            group.all_reduce(std::span(data));
            ASSERT_EQ(data[0], rank < 2 ? 1 : 5);
            ASSERT_EQ(data[1], 2 * round);
          }
          std::vector<std::int64_t> all{1};
          groups[0].all_reduce(std::span(all));
          ASSERT_EQ(all[0], 4);
        }
      },
      over_messages());
}

TEST(Messages, StagingIsTwoPiecesAPeerOnceASumNeedsThem) {
  ThreadRanksOptions options = over_messages();
  options.comm.ledger = MemoryLedger::create();
  run_ranks(
      3,
      [&](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
        const Communicator comm(backend);
        EXPECT_EQ(backend->memory_bytes(), 0U);
        std::vector<double> small(8);
        comm.all_reduce(std::span(small));
        EXPECT_EQ(backend->memory_bytes(), 0U);
        std::vector<double> large(100'000);
        comm.all_reduce(std::span(large));
        EXPECT_EQ(backend->memory_bytes(), 2U * 2U * options.comm.staging_bytes);
      },
      options);
  EXPECT_EQ(options.comm.ledger->live().total(), 0U);
}

/// Passes messages on and keeps the largest.
class Measured final : public MessageTransport {
 public:
  Measured(std::shared_ptr<MessageTransport> inner, std::atomic<std::size_t>& largest)
      : inner_(std::move(inner)), largest_(largest) {}
  [[nodiscard]] int rank() const override { return inner_->rank(); }
  [[nodiscard]] int size() const override { return inner_->size(); }
  [[nodiscard]] std::string_view kind() const override { return inner_->kind(); }
  std::unique_ptr<Transfer> send(int to, std::uint32_t tag, std::span<const std::byte> bytes) override {
    std::size_t before = largest_;
    while (before < bytes.size() && !largest_.compare_exchange_weak(before, bytes.size())) {
    }
    return inner_->send(to, tag, bytes);
  }
  std::unique_ptr<Transfer> receive(int from, std::uint32_t tag, std::span<std::byte> bytes) override {
    return inner_->receive(from, tag, bytes);
  }

 private:
  std::shared_ptr<MessageTransport> inner_;
  std::atomic<std::size_t>& largest_;
};

// A link that carries both directions at once is used in both: a message of all bytes would occupy it in one.
TEST(Messages, ExchangesGoInPieces) {
  constexpr int kRanks = 3;
  std::atomic<std::size_t> largest = 0;
  const auto hub = std::make_shared<MessageHub>(kRanks);
  const CommOptions options = quick_options();
  const std::size_t element = sizeof(std::int64_t);
  const std::size_t piece = options.staging_bytes / element;
  const std::vector<std::size_t> counts{2 * piece + 7, 0, piece};  // of each rank's part
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const std::shared_ptr<CommBackend> backend =
          make_message_backend(std::make_shared<Measured>(hub->transport(rank), largest), options);
      const Communicator comm(backend);
      const auto own = static_cast<std::size_t>(rank);
      std::vector<std::int64_t> part(counts[own]);
      std::iota(part.begin(), part.end(), 1'000'000 * rank);
      std::vector<std::int64_t> all(counts[0] + counts[1] + counts[2]);
      const std::vector<std::int64_t> of_ranks(counts.begin(), counts.end());
      comm.all_gather(std::span<const std::int64_t>(part), std::span(all), of_ranks);
      std::size_t at = 0;
      for (std::size_t from = 0; from < counts.size(); ++from) {
        for (std::size_t index = 0; index < counts[from]; ++index, ++at)
          ASSERT_EQ(all[at], static_cast<std::int64_t>(1'000'000 * from + index)) << from;
      }
      // Rank r gives each rank r + 1 pieces and a little.
      const std::size_t given = (own + 1) * piece + 3;
      std::vector<std::int64_t> out(kRanks * given);
      std::iota(out.begin(), out.end(), 10'000'000 * rank);
      std::vector<std::int64_t> taken;
      for (int from = 0; from < kRanks; ++from) taken.push_back((from + 1) * static_cast<std::int64_t>(piece) + 3);
      std::vector<std::int64_t> in(6 * piece + 9);
      comm.all_to_all(std::span<const std::int64_t>(out), std::span(in),
                      std::vector<std::int64_t>(kRanks, static_cast<std::int64_t>(given)), taken);
      at = 0;
      for (std::size_t from = 0; from < counts.size(); ++from) {
        const auto length = static_cast<std::size_t>(taken[from]);
        for (std::size_t index = 0; index < length; ++index, ++at)
          ASSERT_EQ(in[at], static_cast<std::int64_t>(10'000'000 * from + own * length + index)) << from;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(largest, options.staging_bytes);
}

TEST(Messages, WindowsAreRefused) {
  run_ranks(
      1,
      [](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
        EXPECT_FALSE(backend->capabilities().one_sided);
        EXPECT_THROW((void)backend->attach(Arena{}, "window"), Error);
        EXPECT_THROW(backend->wait_until([] { return true; }, {}), Error);
      },
      over_messages());
}

}  // namespace
}  // namespace zeroth::test
