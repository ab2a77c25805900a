// The commit vote over ranks as threads: one decision, the same on every rank, and the right one.
#include "engine/commit_vote.h"

#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <vector>

namespace zeroth {
namespace {

std::vector<CommitVote> vote_all(int world, const std::function<Ballot(int)>& ballot) {
  std::vector<CommitVote> votes(static_cast<std::size_t>(world));
  const auto report = test::try_ranks(world, [&](int rank, const std::shared_ptr<CommBackend>& backend) {
    votes[static_cast<std::size_t>(rank)] = take_commit_vote(ballot(rank), Communicator(backend));
  });
  EXPECT_TRUE(report.ok()) << report.text();
  return votes;
}

class Judge : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Judge, ::testing::Values(1, 2, 3, 4, 7), ::testing::PrintToStringParamName());

TEST_P(Judge, AddsNormsExactly) {
  const int world = GetParam();
  // Sums that doubles would round: 2^60 and many ones.
  const auto values = [](int rank) {
    return rank == 0 ? std::vector<float>{std::ldexp(1.0F, 30)} : std::vector<float>(1000, 1.0F);
  };
  kernels::NormAccumulator whole;
  for (int rank = 0; rank < world; ++rank) {
    const auto part = values(rank);
    whole.add(part.data(), DType::kFloat32, static_cast<std::int64_t>(part.size()), kernels::Isa::kScalar);
  }
  const auto votes = vote_all(world, [&](int rank) {
    Ballot ballot;
    const auto part = values(rank);
    ballot.norm.add(part.data(), DType::kFloat32, static_cast<std::int64_t>(part.size()), kernels::best_isa());
    return ballot;
  });
  for (const CommitVote& vote : votes) {
    EXPECT_TRUE(vote.norm == whole);
    EXPECT_EQ(vote.norm.sum_of_squares(), std::ldexp(1.0, 60) + 1000.0 * (world - 1));
    EXPECT_EQ(vote.norm.nonfinite_blocks(), 0);
    EXPECT_EQ(vote.offender_rank, -1);
    EXPECT_EQ(vote.failed_rank, -1);
  }
}

TEST_P(Judge, AParameterIsTouchedIfAnyRankTouchedIt) {
  const int world = GetParam();
  for (const std::size_t params : {0U, 1U, 3U, 4U, 5U, 1001U}) {
    const auto touches = [](int rank, std::size_t param) {
      return param % 3 == 0 || param % 7 == static_cast<std::size_t>(rank);
    };
    const auto votes = vote_all(world, [&](int rank) {
      Ballot ballot;
      for (std::size_t param = 0; param < params; ++param) ballot.has_grad.push_back(touches(rank, param));
      return ballot;
    });
    for (const CommitVote& vote : votes) {
      ASSERT_EQ(vote.has_grad.size(), params);
      for (std::size_t param = 0; param < params; ++param) {
        bool any = false;
        for (int rank = 0; rank < world; ++rank) any = any || touches(rank, param);
        ASSERT_EQ(vote.has_grad[param], any) << param;
      }
    }
  }
}

TEST_P(Judge, TheFirstOffenderIsOfTheEarliestMicroStepThenTheLowestRank) {
  const int world = GetParam();
  // Rank r offends in micro-step (r * 3) % 5; rank 0 never does.
  const auto micro_step = [](int rank) { return static_cast<std::int64_t>(rank * 3 % 5); };
  const auto votes = vote_all(world, [&](int rank) {
    Ballot ballot;
    if (rank > 0) {
      ballot.offender = {.param = 100 + rank, .micro_step = micro_step(rank), .count = std::uint64_t{1} << 40U};
    }
    return ballot;
  });
  int first = -1;
  for (int rank = 1; rank < world; ++rank) {
    if (first < 0 || micro_step(rank) < micro_step(first)) first = rank;
  }
  for (const CommitVote& vote : votes) {
    EXPECT_EQ(vote.offender_rank, first);
    if (first < 0) continue;
    EXPECT_EQ(vote.offender.param, 100 + first);
    EXPECT_EQ(vote.offender.micro_step, micro_step(first));
    EXPECT_EQ(vote.offender.count, std::uint64_t{1} << 40U);
  }
}

TEST_P(Judge, TheFirstParameterMayBeNumberZero) {
  const int world = GetParam();
  const auto votes = vote_all(world, [&](int rank) {
    Ballot ballot;
    if (rank == world - 1) ballot.offender = {.param = 0, .micro_step = 2, .count = 1};
    return ballot;
  });
  for (const CommitVote& vote : votes) {
    EXPECT_EQ(vote.offender_rank, world - 1);
    EXPECT_EQ(vote.offender.param, 0);
  }
}

TEST_P(Judge, NamesTheLowestRankWhoseBackwardFailed) {
  const int world = GetParam();
  const auto votes = vote_all(world, [&](int rank) {
    Ballot ballot;
    ballot.failed = rank >= world / 2;
    return ballot;
  });
  for (const CommitVote& vote : votes) EXPECT_EQ(vote.failed_rank, world / 2);
}

TEST_P(Judge, ANonFiniteBlockOfOneRankReachesAll) {
  const int world = GetParam();
  const auto votes = vote_all(world, [&](int rank) {
    Ballot ballot;
    const float value = rank == world - 1 ? NAN : 1.0F;
    ballot.norm.add(&value, DType::kFloat32, 1, kernels::Isa::kScalar);
    return ballot;
  });
  for (const CommitVote& vote : votes) {
    EXPECT_EQ(vote.norm.nonfinite_blocks(), 1);
    EXPECT_EQ(vote.norm.num_blocks(), world);
    EXPECT_TRUE(std::isinf(vote.norm.l2_norm()));
  }
}

TEST(Judge, RanksThatWereAskedToMakeRoomAndUnevenBackwardsAreKnownToAll) {
  for (const CommitVote& vote : vote_all(4, [](int rank) {
         Ballot ballot;
         ballot.preempted = rank == 2;
         ballot.backwards = rank == 3 ? 2 : 1;
         ballot.times = {.between_us = rank,
                         .forward_us = 10 * rank,
                         .backward_us = 20 * rank,
                         .step_us = 2,
                         .waited_us = 100 * rank};
         return ballot;
       })) {
    EXPECT_EQ(vote.preempted_rank, 2);
    EXPECT_EQ(vote.uneven_rank, 3);
    EXPECT_EQ(vote.backwards, (std::vector<std::int64_t>{1, 1, 1, 2}));
    ASSERT_EQ(vote.times.size(), 4U);
    EXPECT_EQ(vote.times[0], (StepTimes{.step_us = 2}));
    EXPECT_EQ(vote.times[3],
              (StepTimes{.between_us = 3, .forward_us = 30, .backward_us = 60, .step_us = 2, .waited_us = 300}));
  }
}

TEST(Judge, WhoTrainsOtherParametersIsFoundAmongThoseWithABatch) {
  const std::vector<bool> usual{true, false, true};
  const std::vector<bool> other{true, true, true};
  const auto votes = [&](int joined) {
    return vote_all(4, [&](int rank) {
      Ballot ballot;
      ballot.trains = {digest_of(rank == 2 ? other : usual)};
      ballot.joined = rank == 2 ? joined : 0;
      ballot.out = ballot.joined > 0;
      return ballot;
    });
  };
  for (const CommitVote& vote : votes(0)) {
    EXPECT_EQ(vote.usual_trains_rank, 0);
    EXPECT_EQ(vote.other_trains_rank, 2);
    EXPECT_TRUE(vote.refused());
  }
  for (const CommitVote& vote : votes(1)) EXPECT_FALSE(vote.refused()) << "what that rank had before its last batch";
}

TEST(JudgeMismatch, DifferentModelsAreAnErrorOnEveryRank) {
  const auto report = test::try_ranks(2,
                                      [](int rank, const std::shared_ptr<CommBackend>& backend) {
                                        Ballot ballot;
                                        ballot.has_grad.assign(rank == 0 ? 4 : 40, true);
                                        (void)take_commit_vote(ballot, Communicator(backend));
                                      },
                                      {.abort_on_failure = false});
  ASSERT_EQ(report.failures.size(), 2U);
  for (const auto& failure : report.failures) EXPECT_EQ(failure.code, ErrorCode::kMismatch) << failure.text;
}

}  // namespace
}  // namespace zeroth
