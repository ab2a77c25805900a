// Mapping: which ranks have which layers, if ranks and links are unlike.
//
// The stages of a pipeline are runs of layers, in order, one a rank. Stage s takes the time t of its layers divided by
// the speed of its rank; between stage s and the next one a message goes and its gradient comes back in the time l,
// twice latency and bytes / bandwidth. In 1F1B a rank waits for the backward of as many micro-batches as there are
// stages from it on, so a step of m micro-batches takes about
//
//   T = sum of t + sum of l + (m - 1) P,   P = max over s <= e of (t_s + l_s + t_s+1 + ... + l_e-1 + t_e) / (e - s + 1)
//
// and P at least what a message occupies its link. map_layers() finds the mapping for which T is smallest. So a slow
// rank gets fewer layers, and a slow link between two clusters lies between two stages only. Ref: Yang et al., "Holmes:
// Towards Distributed Training Across Clusters with Heterogeneous NIC Environment", 2023.
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

/// A mapping with the smallest T. Every rank gets at least one layer. Ranks with the same speed and links count as one
/// kind: time grows with the square of layers and the product of the numbers of each kind. Throws kUsage for fewer
/// layers than ranks, for values that are no times, and for more than a million states.
[[nodiscard]] LayerMap map_layers(const LayerTimes& layers, const Cluster& cluster, int micro_batches);
/// T of a given mapping, whose `step_time` does not matter.
[[nodiscard]] double step_time_of(const LayerMap& map, const LayerTimes& layers, const Cluster& cluster,
                                  int micro_batches);
/// The costs with which simulate() runs a program that has this mapping: chunk s is stage s, its rank s. A third of a
/// stage's time is F, I and W each.
[[nodiscard]] Costs costs_of(const LayerMap& map, const LayerTimes& layers, const Cluster& cluster);

}  // namespace zeroth
