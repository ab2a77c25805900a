// Mapping: which ranks have which layers, if ranks and links are unlike.
//
// The stages of a pipeline are runs of layers, in order, one a rank. A stage takes the time of its layers divided by
// the speed of its rank; a message between two stages takes latency and bytes / bandwidth, forwards and backwards. A
// step of m micro-batches is taken to last
//
//   the sum of all stages and messages + (m - 1) * the longest of them
//
// which is what 1F1B takes, if its longest part is busy all the time. map_layers() finds the mapping for which this is
// smallest. So a slow rank gets fewer layers, and a slow link between two clusters lies between two stages only.
// Ref: Yang et al., "Holmes: Towards Distributed Training Across Clusters with Heterogeneous NIC Environment", 2023.
#pragma once

#include <zeroth/program/simulate.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace zeroth {

struct Cluster {
  std::vector<double> speeds{1};                     ///< one a rank
  LinkCosts link{};                                  ///< between two ranks
  std::map<std::pair<int, int>, LinkCosts> links{};  ///< those that are unlike it, (from, to)
};

struct LayerTimes {
  std::vector<double> times{};               ///< F, I and W together, of each layer, at speed 1
  std::vector<std::int64_t> output_bytes{};  ///< of the message behind each layer; none: 0
};

struct LayerMap {
  std::vector<int> rank_of_stage{};
  std::vector<int> first_layer{};  ///< of each stage
  double step_time = 0;
};

/// The best mapping; the first of equal ones, in the order of ranks. Every rank gets at least one layer. Ranks with the
/// same speed and links count as one kind: time grows with the square of layers and the product of the numbers of each
/// kind. Throws kUsage for fewer layers than ranks, for values that are no times, and for more than a million states.
[[nodiscard]] LayerMap map_layers(const LayerTimes& layers, const Cluster& cluster, int micro_batches);
/// The time above of a given mapping, whose `step_time` does not matter.
[[nodiscard]] double step_time_of(const LayerMap& map, const LayerTimes& layers, const Cluster& cluster,
                                  int micro_batches);
/// The costs with which simulate() runs a program that has this mapping: chunk s is stage s, its rank s. A third of a
/// stage's time is F, I and W each.
[[nodiscard]] Costs costs_of(const LayerMap& map, const LayerTimes& layers, const Cluster& cluster);

}  // namespace zeroth
