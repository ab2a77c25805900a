#include "program/costs.h"

#include <zeroth/base/error.h>
#include <zeroth/program/mapping.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>

namespace zeroth {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr std::size_t kMostStates = 1'000'000;
constexpr double kSmaller = 1 - 1e-12;  // a mean and a sum of differences are rounded in different ways

const LinkCosts& link_of(const Cluster& cluster, int from, int to) {
  const auto unlike = cluster.links.find({from, to});
  return unlike == cluster.links.end() ? cluster.link : unlike->second;
}

std::int64_t bytes_behind(const LayerTimes& layers, int layer) {
  return layers.output_bytes.empty() ? 0 : layers.output_bytes[static_cast<std::size_t>(layer)];
}

/// A message and the gradient that comes back.
struct Message {
  double round_trip = 0;
  double occupied = 0;  ///< the longer of the two times in which the link is busy
};

Message message_between(const Cluster& cluster, int from, int to, std::int64_t bytes) {
  Message message;
  for (const LinkCosts& link : {link_of(cluster, from, to), link_of(cluster, to, from)}) {
    const double busy = link.bytes_per_second > 0 ? static_cast<double>(bytes) / link.bytes_per_second : 0;
    message.round_trip += link.latency + busy;
    message.occupied = std::max(message.occupied, busy);
  }
  return message;
}

void check(const LayerTimes& layers, const Cluster& cluster, int micro_batches) {
  const auto require = [](bool holds, const char* what, const std::string& expected) {
    ZR_CHECK(holds, ErrorCode::kUsage, what, {.where = "program.map_layers", .expected = expected});
  };
  require(!cluster.speeds.empty() && layers.times.size() >= cluster.speeds.size(), "there are fewer layers than ranks",
          "a layer or more for each of " + std::to_string(cluster.speeds.size()) + " ranks");
  require(layers.output_bytes.empty() || layers.output_bytes.size() == layers.times.size(),
          "bytes are not said of every layer", std::to_string(layers.times.size()) + " numbers, or none");
  require(micro_batches >= 1, "a step needs micro-batches", "at least one");
  require(std::ranges::all_of(layers.times, is_time), "the time of a layer is not usable", "finite numbers from 0");
  require(std::ranges::all_of(layers.output_bytes, [](std::int64_t bytes) { return bytes >= 0; }),
          "the bytes of a layer are not usable", "numbers from 0");
  require(std::ranges::all_of(cluster.speeds, [](double speed) { return std::isfinite(speed) && speed > 0; }),
          "a speed is not usable", "more than 0");
  bool links = is_time(cluster.link.latency) && is_time(cluster.link.bytes_per_second);
  for (const auto& [pair, link] : cluster.links)
    links = links && is_time(link.latency) && is_time(link.bytes_per_second);
  require(links, "a link is not usable", "finite numbers from 0");
}

/// Whether the two ranks may change places in any mapping.
bool are_alike(const Cluster& cluster, int a, int b) {
  const auto at = [&](int rank) { return cluster.speeds[static_cast<std::size_t>(rank)]; };
  if (at(a) != at(b) || link_of(cluster, a, b) != link_of(cluster, b, a)) return false;
  for (int other = 0; other < static_cast<int>(cluster.speeds.size()); ++other) {
    if (other == a || other == b) continue;
    if (link_of(cluster, a, other) != link_of(cluster, b, other)) return false;
    if (link_of(cluster, other, a) != link_of(cluster, other, b)) return false;
  }
  return true;
}

/// Kinds of ranks: the ranks of each.
std::vector<std::vector<int>> kinds_of(const Cluster& cluster) {
  std::vector<std::vector<int>> kinds;
  for (int rank = 0; rank < static_cast<int>(cluster.speeds.size()); ++rank) {
    const auto kind = std::ranges::find_if(kinds, [&](const std::vector<int>& alike) {
      return std::ranges::all_of(alike, [&](int other) { return are_alike(cluster, other, rank); });
    });
    if (kind == kinds.end()) {
      kinds.push_back({rank});
    } else {
      kind->push_back(rank);
    }
  }
  return kinds;
}

/// Times of a mapping.
struct Parts {
  double sum = 0;
  double period = 0;  ///< P
};

/// The mappings with the smallest sum among those whose period is smaller than a bound, by dynamic programming over
/// (how many ranks of each kind are used, the kind of the last of them, how many layers they have).
class Search {
 public:
  Search(const LayerTimes& layers, const Cluster& cluster)
      : layers_(layers), cluster_(cluster), kinds_(kinds_of(cluster)), before_(layers.times.size() + 1, 0) {
    std::partial_sum(layers.times.begin(), layers.times.end(), before_.begin() + 1);
    for (const std::vector<int>& kind : kinds_) {
      strides_.push_back(used_states_);
      used_states_ *= kind.size() + 1;
      ZR_CHECK(used_states_ <= kMostStates, ErrorCode::kUsage, "the ranks are of too many kinds",
               {.where = "program.map_layers", .expected = "fewer kinds of speeds and links"});
    }
    const std::size_t states = used_states_ * kinds_.size() * before_.size();
    ZR_CHECK(states <= kMostStates, ErrorCode::kUsage, "there are too many layers and kinds of ranks",
             {.where = "program.map_layers",
              .expected = "at most " + std::to_string(kMostStates) + " states",
              .got = std::to_string(states)});
  }

  /// False if no mapping has a smaller period.
  bool find(double bound, LayerMap& map) {
    cells_.assign(used_states_ * kinds_.size() * before_.size(), {});
    cell(0, 0, 0).push_back({});
    for (std::size_t used = 0; used < used_states_; ++used) {
      for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
        for (std::size_t layer = 0; layer + 1 < before_.size(); ++layer) {
          // An index, for the list of another cell grows meanwhile.
          for (std::size_t label = 0; label < cell(used, kind, layer).size(); ++label)
            extend(used, kind, layer, label, bound);
        }
      }
    }
    return read_back(map);
  }

 private:
  /// A way to use these ranks for these layers. Better than another if both numbers are smaller.
  struct Label {
    double sum = 0;
    /// The largest of t_s + l_s + ... + t_e - (e - s + 1) bound, over all s up to the last stage e.
    double over = 0;
    std::size_t last_kind = 0;  ///< before this stage
    std::size_t last_layer = 0;
    std::size_t last_label = 0;
  };
  using Cell = std::vector<Label>;

  Cell& cell(std::size_t used, std::size_t kind, std::size_t layer) {
    return cells_[(used * kinds_.size() + kind) * before_.size() + layer];
  }
  [[nodiscard]] std::size_t used_of(std::size_t used, std::size_t kind) const {
    return used / strides_[kind] % (kinds_[kind].size() + 1);
  }

  /// One more stage behind the first `layer` layers.
  void extend(std::size_t used, std::size_t kind, std::size_t layer, std::size_t label, double bound) {
    const Label from = cell(used, kind, layer)[label];
    for (std::size_t next = 0; next < kinds_.size(); ++next) {
      if (used_of(used, next) == kinds_[next].size()) continue;
      Message message;
      if (used > 0) {
        // Any two ranks of these kinds; of one kind two that are not the same.
        const int rank = kind == next ? kinds_[next].back() : kinds_[next].front();
        message =
            message_between(cluster_, kinds_[kind].front(), rank, bytes_behind(layers_, static_cast<int>(layer) - 1));
      }
      if (message.occupied >= bound) continue;
      const double speed = cluster_.speeds[static_cast<std::size_t>(kinds_[next].front())];
      for (std::size_t end = layer + 1; end < before_.size(); ++end) {
        const double stage = (before_[end] - before_[layer]) / speed;
        if (stage >= bound) break;
        const double over = std::max(0.0, used > 0 ? from.over + message.round_trip : 0.0) + stage - bound;
        if (over >= 0) break;
        insert(cell(used + strides_[next], next, end), {.sum = from.sum + message.round_trip + stage,
                                                        .over = over,
                                                        .last_kind = kind,
                                                        .last_layer = layer,
                                                        .last_label = label});
      }
    }
  }

  static void insert(Cell& cell, const Label& label) {
    const auto better = [](const Label& a, const Label& b) { return a.sum <= b.sum && a.over <= b.over; };
    if (std::ranges::any_of(cell, [&](const Label& other) { return better(other, label); })) return;
    std::erase_if(cell, [&](const Label& other) { return better(label, other); });
    cell.push_back(label);
  }

  bool read_back(LayerMap& map) {
    std::size_t used = used_states_ - 1;
    std::size_t layer = before_.size() - 1;
    std::size_t kind = 0;
    const Label* label = nullptr;
    for (std::size_t other = 0; other < kinds_.size(); ++other) {
      for (const Label& candidate : cell(used, other, layer)) {
        if (label != nullptr && candidate.sum >= label->sum) continue;
        label = &candidate;
        kind = other;
      }
    }
    if (label == nullptr) return false;
    std::vector<std::vector<int>> left = kinds_;
    map = {};
    while (used > 0) {
      map.rank_of_stage.push_back(left[kind].back());
      left[kind].pop_back();
      map.first_layer.push_back(static_cast<int>(label->last_layer));
      used -= strides_[kind];
      layer = label->last_layer;
      kind = label->last_kind;
      label = &cell(used, kind, layer)[label->last_label];
    }
    std::ranges::reverse(map.rank_of_stage);
    std::ranges::reverse(map.first_layer);
    return true;
  }

  const LayerTimes& layers_;
  const Cluster& cluster_;
  std::vector<std::vector<int>> kinds_;
  std::vector<double> before_;  // times of the first layers
  std::vector<std::size_t> strides_{};
  std::size_t used_states_ = 1;
  std::vector<Cell> cells_{};
};

Parts parts_of(const LayerMap& map, const LayerTimes& layers, const Cluster& cluster) {
  std::vector<double> before(layers.times.size() + 1, 0);
  std::partial_sum(layers.times.begin(), layers.times.end(), before.begin() + 1);
  Parts parts;
  std::vector<double> stages;
  std::vector<double> messages;
  for (std::size_t stage = 0; stage < map.first_layer.size(); ++stage) {
    const auto begin = static_cast<std::size_t>(map.first_layer[stage]);
    const std::size_t end =
        stage + 1 < map.first_layer.size() ? static_cast<std::size_t>(map.first_layer[stage + 1]) : layers.times.size();
    const int rank = map.rank_of_stage[stage];
    Message message;
    if (stage > 0)
      message = message_between(cluster, map.rank_of_stage[stage - 1], rank,
                                bytes_behind(layers, static_cast<int>(begin) - 1));
    parts.period = std::max(parts.period, message.occupied);
    messages.push_back(message.round_trip);
    stages.push_back((before[end] - before[begin]) / cluster.speeds[static_cast<std::size_t>(rank)]);
    parts.sum += message.round_trip + stages.back();
    double run = 0;
    for (std::size_t first = stage + 1; first > 0; --first) {
      run += stages[first - 1];
      parts.period = std::max(parts.period, run / static_cast<double>(stage + 2 - first));
      run += messages[first - 1];
    }
  }
  return parts;
}

void require_map(const LayerMap& map, const LayerTimes& layers, const Cluster& cluster) {
  std::vector<int> ranks = map.rank_of_stage;
  std::ranges::sort(ranks);
  std::vector<int> all(cluster.speeds.size());
  std::iota(all.begin(), all.end(), 0);
  const bool rising =
      std::ranges::adjacent_find(map.first_layer, std::ranges::greater_equal{}) == map.first_layer.end();
  ZR_CHECK(ranks == all && map.first_layer.size() == ranks.size() && map.first_layer.front() == 0 && rising &&
               map.first_layer.back() < static_cast<int>(layers.times.size()),
           ErrorCode::kUsage, "this is no mapping of these layers",
           {.where = "program.mapping", .expected = "every rank once, and first layers that rise from 0"});
}

}  // namespace

LayerMap map_layers(const LayerTimes& layers, const Cluster& cluster, int micro_batches) {
  check(layers, cluster, micro_batches);
  Search search(layers, cluster);
  LayerMap best{.step_time = kInfinite};
  LayerMap map;
  // Smaller and smaller periods, each with the smallest sum: the best mapping is one of them.
  for (double bound = kInfinite; search.find(bound, map);) {
    const Parts parts = parts_of(map, layers, cluster);
    map.step_time = parts.sum + (micro_batches - 1) * parts.period;
    if (map.step_time < best.step_time) best = map;
    bound = std::min(parts.period, bound * kSmaller);
  }
  return best;
}

double step_time_of(const LayerMap& map, const LayerTimes& layers, const Cluster& cluster, int micro_batches) {
  check(layers, cluster, micro_batches);
  require_map(map, layers, cluster);
  const Parts parts = parts_of(map, layers, cluster);
  return parts.sum + (micro_batches - 1) * parts.period;
}

Costs costs_of(const LayerMap& map, const LayerTimes& layers, const Cluster& cluster) {
  check(layers, cluster, 1);
  require_map(map, layers, cluster);
  Costs costs{.link = cluster.link};
  const int stages = static_cast<int>(map.first_layer.size());
  for (int stage = 0; stage < stages; ++stage) {
    const int begin = map.first_layer[static_cast<std::size_t>(stage)];
    const int end = stage + 1 < stages ? map.first_layer[static_cast<std::size_t>(stage) + 1]
                                       : static_cast<int>(layers.times.size());
    const double time = std::accumulate(layers.times.begin() + begin, layers.times.begin() + end, 0.0) / 3;
    costs.chunks.push_back(
        {.forward = time, .input = time, .weight = time, .output_bytes = bytes_behind(layers, end - 1)});
    costs.speeds.push_back(
        cluster.speeds[static_cast<std::size_t>(map.rank_of_stage[static_cast<std::size_t>(stage)])]);
    for (int other = 0; other < stages; ++other) {
      if (other != stage)
        costs.links[{stage, other}] = link_of(cluster, map.rank_of_stage[static_cast<std::size_t>(stage)],
                                              map.rank_of_stage[static_cast<std::size_t>(other)]);
    }
  }
  return costs;
}

}  // namespace zeroth
