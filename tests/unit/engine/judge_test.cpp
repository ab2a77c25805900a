// The judge over ranks as threads: one decision, the same on every rank, and the right one.
#include "engine/judge.h"

#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <vector>

namespace zeroth {
namespace {

std::vector<Verdict> judge_all(int world, const std::function<Evidence(int)>& evidence) {
  std::vector<Verdict> verdicts(static_cast<std::size_t>(world));
  const auto report = test::try_ranks(world, [&](int rank, const std::shared_ptr<CommBackend>& backend) {
    verdicts[static_cast<std::size_t>(rank)] = judge(evidence(rank), Communicator(backend));
  });
  EXPECT_TRUE(report.ok()) << report.text();
  return verdicts;
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
  const auto verdicts = judge_all(world, [&](int rank) {
    Evidence evidence;
    const auto part = values(rank);
    evidence.norm.add(part.data(), DType::kFloat32, static_cast<std::int64_t>(part.size()), kernels::best_isa());
    return evidence;
  });
  for (const Verdict& verdict : verdicts) {
    EXPECT_TRUE(verdict.norm == whole);
    EXPECT_EQ(verdict.norm.sum_of_squares(), std::ldexp(1.0, 60) + 1000.0 * (world - 1));
    EXPECT_EQ(verdict.norm.nonfinite_blocks(), 0);
    EXPECT_EQ(verdict.offender_rank, -1);
    EXPECT_EQ(verdict.failed_rank, -1);
  }
}

TEST_P(Judge, AParameterIsTouchedIfAnyRankTouchedIt) {
  const int world = GetParam();
  for (const std::size_t params : {0U, 1U, 3U, 4U, 5U, 1001U}) {
    const auto touches = [](int rank, std::size_t param) {
      return param % 3 == 0 || param % 7 == static_cast<std::size_t>(rank);
    };
    const auto verdicts = judge_all(world, [&](int rank) {
      Evidence evidence;
      for (std::size_t param = 0; param < params; ++param) evidence.touched.push_back(touches(rank, param));
      return evidence;
    });
    for (const Verdict& verdict : verdicts) {
      ASSERT_EQ(verdict.touched.size(), params);
      for (std::size_t param = 0; param < params; ++param) {
        bool any = false;
        for (int rank = 0; rank < world; ++rank) any = any || touches(rank, param);
        ASSERT_EQ(verdict.touched[param], any) << param;
      }
    }
  }
}

TEST_P(Judge, TheFirstOffenderIsOfTheEarliestMicroStepThenTheLowestRank) {
  const int world = GetParam();
  // Rank r offends in micro-step (r * 3) % 5; rank 0 never does.
  const auto micro_step = [](int rank) { return static_cast<std::int64_t>(rank * 3 % 5); };
  const auto verdicts = judge_all(world, [&](int rank) {
    Evidence evidence;
    if (rank > 0) {
      evidence.offender = {.param = 100 + rank, .micro_step = micro_step(rank), .count = std::uint64_t{1} << 40U};
    }
    return evidence;
  });
  int first = -1;
  for (int rank = 1; rank < world; ++rank) {
    if (first < 0 || micro_step(rank) < micro_step(first)) first = rank;
  }
  for (const Verdict& verdict : verdicts) {
    EXPECT_EQ(verdict.offender_rank, first);
    if (first < 0) continue;
    EXPECT_EQ(verdict.offender.param, 100 + first);
    EXPECT_EQ(verdict.offender.micro_step, micro_step(first));
    EXPECT_EQ(verdict.offender.count, std::uint64_t{1} << 40U);
  }
}

TEST_P(Judge, TheFirstParameterMayBeNumberZero) {
  const int world = GetParam();
  const auto verdicts = judge_all(world, [&](int rank) {
    Evidence evidence;
    if (rank == world - 1) evidence.offender = {.param = 0, .micro_step = 2, .count = 1};
    return evidence;
  });
  for (const Verdict& verdict : verdicts) {
    EXPECT_EQ(verdict.offender_rank, world - 1);
    EXPECT_EQ(verdict.offender.param, 0);
  }
}

TEST_P(Judge, NamesTheLowestRankWhoseBackwardFailed) {
  const int world = GetParam();
  const auto verdicts = judge_all(world, [&](int rank) {
    Evidence evidence;
    evidence.failed = rank >= world / 2;
    return evidence;
  });
  for (const Verdict& verdict : verdicts) EXPECT_EQ(verdict.failed_rank, world / 2);
}

TEST_P(Judge, ANonFiniteBlockOfOneRankReachesAll) {
  const int world = GetParam();
  const auto verdicts = judge_all(world, [&](int rank) {
    Evidence evidence;
    const float value = rank == world - 1 ? NAN : 1.0F;
    evidence.norm.add(&value, DType::kFloat32, 1, kernels::Isa::kScalar);
    return evidence;
  });
  for (const Verdict& verdict : verdicts) {
    EXPECT_EQ(verdict.norm.nonfinite_blocks(), 1);
    EXPECT_EQ(verdict.norm.num_blocks(), world);
    EXPECT_TRUE(std::isinf(verdict.norm.l2_norm()));
  }
}

TEST(Judge, RanksThatWereAskedToMakeRoomAndUnevenBackwardsAreKnownToAll) {
  for (const Verdict& verdict : judge_all(4, [](int rank) {
         Evidence evidence;
         evidence.preempted = rank == 2;
         evidence.backwards = rank == 3 ? 2 : 1;
         evidence.times = {.between_us = rank,
                           .forward_us = 10 * rank,
                           .backward_us = 20 * rank,
                           .step_us = 2,
                           .waited_us = 100 * rank};
         return evidence;
       })) {
    EXPECT_EQ(verdict.preempted_rank, 2);
    EXPECT_EQ(verdict.uneven_rank, 3);
    EXPECT_EQ(verdict.backwards, (std::vector<std::int64_t>{1, 1, 1, 2}));
    ASSERT_EQ(verdict.times.size(), 4U);
    EXPECT_EQ(verdict.times[0], (StepTimes{.step_us = 2}));
    EXPECT_EQ(verdict.times[3],
              (StepTimes{.between_us = 3, .forward_us = 30, .backward_us = 60, .step_us = 2, .waited_us = 300}));
  }
}

TEST(JudgeMismatch, DifferentModelsAreAnErrorOnEveryRank) {
  const auto report = test::try_ranks(2,
                                      [](int rank, const std::shared_ptr<CommBackend>& backend) {
                                        Evidence evidence;
                                        evidence.touched.assign(rank == 0 ? 4 : 40, true);
                                        (void)judge(evidence, Communicator(backend));
                                      },
                                      {.abort_on_failure = false});
  ASSERT_EQ(report.failures.size(), 2U);
  for (const auto& failure : report.failures) EXPECT_EQ(failure.code, ErrorCode::kMismatch) << failure.text;
}

}  // namespace
}  // namespace zeroth
