// The plan that is proposed for measured links.
#include "doctor/advice.h"

#include <zeroth/base/error.h>
#include <zeroth/zero/memory_plan.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace zeroth::doctor {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

constexpr double kGiga = 1e9;

std::uint64_t gib(double count) {
  return static_cast<std::uint64_t>(count * 1073741824.0);
}

std::string name_of_chosen(const Advice& advice) {
  return advice.chosen ? advice.plans[*advice.chosen].name : "none";
}

struct Case {
  const char* why;
  Cluster cluster;
  int micro_steps;
  const char* plan;
};

TEST(Advice, FollowsLinksAndMemory) {
  const std::vector<Case> cases{
      {"fast links everywhere",
       {.hosts = 2,
        .ranks_per_host = 8,
        .near_bytes_per_s = 100 * kGiga,
        .far_bytes_per_s = 400 * kGiga,
        .bytes_per_host = gib(640)},
       1,
       "zero-3"},
      {"good links between hosts",
       {.hosts = 2,
        .ranks_per_host = 8,
        .near_bytes_per_s = 100 * kGiga,
        .far_bytes_per_s = 50 * kGiga,
        .bytes_per_host = gib(640)},
       1,
       "zero-3"},
      {"a slow link between hosts",
       {.hosts = 2,
        .ranks_per_host = 8,
        .near_bytes_per_s = 100 * kGiga,
        .far_bytes_per_s = 1.1 * kGiga,
        .bytes_per_host = gib(640)},
       1,
       "hpz-8"},
      {"a slow link, and gathers for each micro-step",
       {.hosts = 2,
        .ranks_per_host = 8,
        .near_bytes_per_s = 100 * kGiga,
        .far_bytes_per_s = 1.1 * kGiga,
        .bytes_per_host = gib(640)},
       4,
       "hpz-8-g8"},
      {"four hosts",
       {.hosts = 4,
        .ranks_per_host = 8,
        .near_bytes_per_s = 100 * kGiga,
        .far_bytes_per_s = 1.1 * kGiga,
        .bytes_per_host = gib(640)},
       1,
       "hpz-8"},
      {"a slow link, but no memory for groups",
       {.hosts = 2,
        .ranks_per_host = 8,
        .near_bytes_per_s = 100 * kGiga,
        .far_bytes_per_s = 1.1 * kGiga,
        .bytes_per_host = gib(77)},
       1,
       "zero-3"},
      {"no memory for any",
       {.hosts = 2,
        .ranks_per_host = 8,
        .near_bytes_per_s = 100 * kGiga,
        .far_bytes_per_s = 1.1 * kGiga,
        .bytes_per_host = gib(60)},
       1,
       "none"},
      {"computing hides a slow link",
       {.hosts = 2,
        .ranks_per_host = 8,
        .near_bytes_per_s = 100 * kGiga,
        .far_bytes_per_s = 1.1 * kGiga,
        .bytes_per_host = gib(640),
        .compute_s = 1000},
       1,
       "zero-3"},
      {"one host",
       {.hosts = 1, .ranks_per_host = 8, .near_bytes_per_s = 100 * kGiga, .bytes_per_host = gib(640)},
       1,
       "zero-3"},
      // There is no group inside a host, and 3 micro-steps gather six times.
      {"one rank on each host",
       {.hosts = 4, .ranks_per_host = 1, .far_bytes_per_s = kGiga, .bytes_per_host = gib(640)},
       3,
       "zero-2"},
      // Nothing is split, and a ring of slots holds the gradients.
      {"one rank", {.hosts = 1, .ranks_per_host = 1, .bytes_per_host = gib(640)}, 1, "zero-3"},
  };
  for (const Case& one : cases) {
    const Advice advice = advise({.params = 7e9, .micro_steps = one.micro_steps}, one.cluster);
    EXPECT_EQ(name_of_chosen(advice), one.plan) << one.why;
    if (!advice.chosen) continue;
    const PlanCost& chosen = advice.plans[*advice.chosen];
    EXPECT_LE(chosen.memory_bytes * static_cast<std::uint64_t>(one.cluster.ranks_per_host), one.cluster.bytes_per_host)
        << one.why;
  }
}

TEST(Advice, CountsTheBytesOfTheEngine) {
  // 32 repeated matrices and one beside them, 4 ranks on 2 hosts, with the engine's own functions as they are used
  // there.
  const ModelSize model{.params = 33e6, .micro_steps = 2};
  const Cluster cluster{.hosts = 2,
                        .ranks_per_host = 2,
                        .near_bytes_per_s = kGiga,
                        .far_bytes_per_s = kGiga / 10,
                        .bytes_per_host = gib(64)};
  const Advice advice = advise(model, cluster);
  ASSERT_EQ(advice.plans.size(), 10U);
  std::vector<ParamSpec> params;
  std::vector<UnitSpec> units;
  for (int i = 0; i < 33; ++i) {
    params.push_back({.name = "p" + std::to_string(i), .shape = {977, 1024}, .dtype = DType::kBFloat16});
    units.push_back({.name = "u" + std::to_string(i), .params = {i}, .repeated = i > 0});
  }
  std::vector<ShardingPlan> plans = all_zero_plans({"dp"});
  plans.push_back(hpz_plan(2, {"dp"}));
  plans.push_back(hsdp_plan(2, {"dp"}));
  for (std::size_t i = 2; i < 6; ++i) {
    plans.push_back(plans[i]);
    plans.back().gradient_degree = 2;
    plans.back().name += "-g2";
  }
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const ModelLayout layout = make_model_layout(params, units, plans[i].degrees(4));
    const std::uint64_t far = plan_far_wire(layout, plans[i], 0, 2, {.node_sizes = {2, 2}, .two_levels = true}).total();
    EXPECT_EQ(advice.plans[i].name, plans[i].name);
    EXPECT_EQ(advice.plans[i].far_bytes, far) << plans[i].name;
    EXPECT_EQ(advice.plans[i].memory_bytes, plan_memory(layout, plans[i], 0, 2, 2).total()) << plans[i].name;
    // Two ranks of a host share what comes from the other one.
    EXPECT_DOUBLE_EQ(advice.plans[i].seconds, static_cast<double>(advice.plans[i].near_bytes) / kGiga +
                                                  static_cast<double>(far) * 2 / (kGiga / 10));
  }
  // Groups inside a host: only gradients and updated parameters cross.
  EXPECT_LT(advice.plans[4].far_bytes, advice.plans[3].far_bytes);
  // Gradients cross once for both micro-steps.
  for (std::size_t i = 2; i < 6; ++i)
    EXPECT_LT(advice.plans[i + 4].far_bytes, advice.plans[i].far_bytes) << advice.plans[i + 4].name;
  EXPECT_EQ(advise({.params = 33e6}, cluster).plans.size(), 6U) << "one micro-step: there is nothing to wait for";
}

TEST(Advice, SaysTheKeysAndWhatStage3WouldCost) {
  const Cluster slow{.hosts = 2,
                     .ranks_per_host = 8,
                     .near_bytes_per_s = 100 * kGiga,
                     .far_bytes_per_s = 1.1 * kGiga,
                     .bytes_per_host = gib(640)};
  const ModelSize model{.params = 7e9};
  const std::vector<std::string> lines = describe(advise(model, slow), model, slow);
  EXPECT_THAT(lines, Contains(HasSubstr("between hosts 1.10 GB/s for each host")));
  EXPECT_THAT(lines, Contains(R"(proposed: hpz-8, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}})"));
  EXPECT_THAT(lines.back(), HasSubstr("stage 3 over all ranks would spend 25."));
  const ModelSize four{.params = 7e9, .micro_steps = 4};
  EXPECT_THAT(
      describe(advise(four, slow), four, slow),
      Contains(
          R"(proposed: hpz-8-g8, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}, "zeroth": {"gradient_degree": 8}})"));
  const Cluster small{.hosts = 1, .ranks_per_host = 1, .bytes_per_host = gib(1)};
  EXPECT_THAT(describe(advise(model, small), model, small).back(), HasSubstr("no plan fits"));
}

TEST(Advice, RefusesSizesThatMakeNoSense) {
  const Cluster good{.hosts = 1, .ranks_per_host = 2, .near_bytes_per_s = kGiga, .bytes_per_host = gib(1)};
  EXPECT_THROW((void)advise({.params = 1}, good), Error);
  EXPECT_THROW((void)advise({.params = 1e9, .dtype = DType::kInt32}, good), Error);
  EXPECT_THROW((void)advise({.params = 1e9, .layers = 0}, good), Error);
  EXPECT_THROW((void)advise({.params = 1e9, .micro_steps = 0}, good), Error);
  Cluster bad = good;
  bad.near_bytes_per_s = 0;
  EXPECT_THROW((void)advise({.params = 1e9}, bad), Error);
  bad = good;
  bad.hosts = 2;
  EXPECT_THROW((void)advise({.params = 1e9}, bad), Error);
  bad = good;
  bad.ranks_per_host = 5000;
  EXPECT_THROW((void)advise({.params = 1e9}, bad), Error);
}

TEST(Advice, NamesALossyMethodWhereLinksCostMoreThanComputing) {
  const ModelSize model{.params = 7e9};
  const auto on = [&](double far_bytes_per_s, double compute_s, int ranks_per_host = 8) {
    return advise(model, {.hosts = 2,
                          .ranks_per_host = ranks_per_host,
                          .near_bytes_per_s = 100 * kGiga,
                          .far_bytes_per_s = far_bytes_per_s,
                          .bytes_per_host = gib(1640),
                          .compute_s = compute_s});
  };
  const auto named = [](const Advice& advice) {
    return advice.lossy_chosen ? advice.lossy[*advice.lossy_chosen].name : "none";
  };
  EXPECT_EQ(named(on(100 * kGiga, 10.0)), "none") << "links are good enough";
  EXPECT_EQ(named(on(kGiga, 0.0)), "none") << "how long a step computes is not known";
  EXPECT_EQ(named(on(2 * kGiga, 9.0)), "zero-2-qg") << "the gentlest that is hidden";
  EXPECT_EQ(named(on(kGiga, 8.0)), "zero++");
  EXPECT_EQ(named(on(0.1 * kGiga, 8.0)), "zero++") << "none is hidden: the fastest, where a host sums first";
  EXPECT_EQ(named(on(0.1 * kGiga, 8.0, 1)), "1-bit Adam") << "ranks that are hosts";
  const Advice slow = on(kGiga, 8.0);
  for (const PlanCost& plan : slow.lossy) EXPECT_LT(plan.far_bytes, slow.plans[3].far_bytes) << plan.name;
  // Bytes that the paper counts: of 2 bytes a parameter, 0.5 and 0.25 between hosts, beside scales.
  const auto of_host = static_cast<double>(slow.lossy[1].far_bytes) * 8;
  EXPECT_NEAR(of_host / (2 * model.params), 0.75 / 2, 0.01) << "a host receives half of it: the other has its own";
  const std::vector<std::string> lines = describe(slow, model,
                                                  {.hosts = 2,
                                                   .ranks_per_host = 8,
                                                   .near_bytes_per_s = 100 * kGiga,
                                                   .far_bytes_per_s = kGiga,
                                                   .bytes_per_host = gib(1640),
                                                   .compute_s = 8.0});
  EXPECT_THAT(lines.back(), HasSubstr("\"zero_quantized_weights\": true, \"zero_hpz_partition_size\": 8"));
  EXPECT_TRUE(advise(model, {.bytes_per_host = gib(640)}).lossy.empty()) << "one host";
}

}  // namespace
}  // namespace zeroth::doctor
