#include "support/error_of.h"

#include <zeroth/program/mapping.h>
#include <zeroth/program/passes.h>
#include <zeroth/program/schedules.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace zeroth {
namespace {

using test::error_of;

/// Every order of the ranks with every way to cut the layers.
template <class Call>
void for_all_maps(int ranks, int layers, const Call& call) {
  LayerMap map;
  map.rank_of_stage.resize(static_cast<std::size_t>(ranks));
  std::iota(map.rank_of_stage.begin(), map.rank_of_stage.end(), 0);
  do {
    std::vector<bool> cut(static_cast<std::size_t>(layers - 1), false);
    std::fill(cut.end() - (ranks - 1), cut.end(), true);
    do {
      map.first_layer = {0};
      for (int layer = 1; layer < layers; ++layer)
        if (cut[static_cast<std::size_t>(layer - 1)]) map.first_layer.push_back(layer);
      call(map);
    } while (std::next_permutation(cut.begin(), cut.end()));
  } while (std::next_permutation(map.rank_of_stage.begin(), map.rank_of_stage.end()));
}

double simulated(const LayerMap& map, const LayerTimes& layers, const Cluster& cluster, int micro_batches) {
  const int ranks = static_cast<int>(cluster.speeds.size());
  return simulate(lower(make_schedule("1f1b", {.ranks = ranks, .micro_batches = micro_batches})),
                  costs_of(map, layers, cluster))
      .step_time;
}

/// Two groups of ranks with fast links inside and slow ones between.
Cluster two_clusters(int first, int second, double speed_of_second, double latency = 1.5) {
  Cluster cluster{.speeds = std::vector<double>(static_cast<std::size_t>(first), 1.0), .link = {.latency = 0.01}};
  cluster.speeds.resize(static_cast<std::size_t>(first + second), speed_of_second);
  for (int a = 0; a < first; ++a) {
    for (int b = first; b < first + second; ++b)
      cluster.links[{a, b}] = cluster.links[{b, a}] = {.latency = latency, .bytes_per_second = 1e6};
  }
  return cluster;
}

int slow_edges(const LayerMap& map, const Cluster& cluster) {
  int edges = 0;
  for (std::size_t stage = 1; stage < map.rank_of_stage.size(); ++stage)
    edges += cluster.links.contains({map.rank_of_stage[stage - 1], map.rank_of_stage[stage]});
  return edges;
}

TEST(ProgramMapping, IsTheBestOfAll) {
  std::mt19937 random(21);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  for (int round = 0; round < 60; ++round) {
    const int ranks = draw(1, 4);
    const int layers = draw(ranks, 7);
    Cluster cluster = round % 3 == 0 ? two_clusters(ranks / 2, ranks - ranks / 2, 2) : Cluster{};
    if (round % 3 != 0) {
      cluster.speeds.assign(static_cast<std::size_t>(ranks), 1);
      for (double& speed : cluster.speeds) speed = draw(1, 3);
    }
    if (round % 3 == 2) cluster.links[{0, ranks - 1}] = {.latency = 5};
    LayerTimes times;
    for (int layer = 0; layer < layers; ++layer) {
      times.times.push_back(draw(1, 9));
      times.output_bytes.push_back(draw(0, 2'000'000));
    }
    const int micro_batches = draw(1, 12);
    const LayerMap best = map_layers(times, cluster, micro_batches);
    EXPECT_EQ(step_time_of(best, times, cluster, micro_batches), best.step_time);
    double least = best.step_time + 1;
    for_all_maps(ranks, layers, [&](const LayerMap& map) {
      least = std::min(least, step_time_of(map, times, cluster, micro_batches));
    });
    EXPECT_DOUBLE_EQ(best.step_time, least) << "round " << round;
  }
}

TEST(ProgramMapping, SimulatesAsTheBestOfAll) {
  // What the formula chooses is, simulated with 1F1B, within two percent of the best of all mappings.
  std::mt19937 random(22);
  for (int round = 0; round < 12; ++round) {
    const Cluster cluster = two_clusters(2, 1 + round % 2, round % 3 == 0 ? 1 : 0.5);
    const int ranks = static_cast<int>(cluster.speeds.size());
    LayerTimes layers;
    for (int layer = 0; layer < 6; ++layer) layers.times.push_back(3.0 + std::uniform_int_distribution(0, 6)(random));
    double least = 1e30;
    for_all_maps(ranks, 6, [&](const LayerMap& map) { least = std::min(least, simulated(map, layers, cluster, 16)); });
    EXPECT_LE(simulated(map_layers(layers, cluster, 16), layers, cluster, 16), 1.02 * least) << "round " << round;
  }
}

TEST(ProgramMapping, OnlyOneEdgeCrossesTheSlowLink) {
  const Cluster cluster = two_clusters(3, 3, 1, 0.1);
  const LayerMap map = map_layers({.times = std::vector<double>(12, 1.0)}, cluster, 8);
  EXPECT_EQ(slow_edges(map, cluster), 1);
  EXPECT_EQ(map.first_layer, (std::vector<int>{0, 2, 4, 6, 8, 10}));
}

TEST(ProgramMapping, StagesBesideASlowLinkGetFewerLayers) {
  // 1F1B waits for the round trip with as many micro-batches under way as there are stages behind the link.
  const Cluster cluster = two_clusters(2, 2, 1, 3);
  const LayerMap map = map_layers({.times = std::vector<double>(16, 1.0)}, cluster, 32);
  EXPECT_EQ(slow_edges(map, cluster), 1);
  EXPECT_LT(map.first_layer[3] - map.first_layer[1], 8);
}

TEST(ProgramMapping, SlowRanksGetFewerLayers) {
  const Cluster cluster = two_clusters(2, 2, 0.5, 0.1);
  const LayerMap map = map_layers({.times = std::vector<double>(12, 1.0)}, cluster, 32);
  EXPECT_EQ(slow_edges(map, cluster), 1);
  for (std::size_t stage = 0; stage < 4; ++stage) {
    const int end = stage < 3 ? map.first_layer[stage + 1] : 12;
    EXPECT_EQ(end - map.first_layer[stage], map.rank_of_stage[stage] < 2 ? 4 : 2) << stage;
  }
}

TEST(ProgramMapping, SixteenRanksOfTwoKindsAreMapped) {
  LayerTimes layers;
  for (int layer = 0; layer < 64; ++layer) layers.times.push_back(1 + layer % 5);
  const Cluster cluster = two_clusters(8, 8, 0.7);
  const LayerMap map = map_layers(layers, cluster, 64);
  EXPECT_EQ(slow_edges(map, cluster), 1);
  EXPECT_LT(map.step_time, 1.4 * 64 * 192 / (8 + 8 * 0.7));
}

TEST(ProgramMapping, RefusesWhatIsNoClusterAndNoMap) {
  const Cluster cluster = two_clusters(1, 1, 1);
  const LayerTimes layers{.times = {1, 2, 3}};
  const auto error = [](const auto& call) { return error_of(ErrorCode::kUsage, [&] { (void)call(); }); };
  EXPECT_NE(error([&] { return map_layers({.times = {1}}, cluster, 1); }).find("fewer layers than ranks"),
            std::string::npos);
  EXPECT_NE(error([&] { return map_layers({.times = {1, -1}}, cluster, 1); }).find("the time of a layer"),
            std::string::npos);
  EXPECT_NE(error([&] { return map_layers(layers, {.speeds = {0}}, 1); }).find("a speed is not usable"),
            std::string::npos);
  EXPECT_NE(error([&] { return map_layers(layers, cluster, 0); }).find("micro-batches"), std::string::npos);
  EXPECT_NE(
      error([&] { return map_layers({.times = {1, 2}, .output_bytes = {1}}, cluster, 1); }).find("bytes are not said"),
      std::string::npos);
  Cluster many{.speeds = std::vector<double>(24)};
  std::iota(many.speeds.begin(), many.speeds.end(), 1.0);
  EXPECT_NE(error([&] { return map_layers({.times = std::vector<double>(24, 1)}, many, 1); }).find("too many kinds"),
            std::string::npos);
  for (const LayerMap& map : {LayerMap{.rank_of_stage = {0, 0}, .first_layer = {0, 1}},
                              LayerMap{.rank_of_stage = {0, 1}, .first_layer = {0, 3}},
                              LayerMap{.rank_of_stage = {0, 1}, .first_layer = {1, 2}}})
    EXPECT_NE(error([&] { return step_time_of(map, layers, cluster, 1); }).find("no mapping of these layers"),
              std::string::npos);
}

}  // namespace
}  // namespace zeroth
