// What a backend over messages promises beside the common suite.
#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
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
