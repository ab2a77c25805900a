#include <zeroth/base/error.h>
#include <zeroth/program/cut.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>

namespace zeroth {
namespace {

constexpr double kNoCut = std::numeric_limits<double>::infinity();

/// Sums of runs of layers.
class Runs {
 public:
  explicit Runs(std::span<const double> costs) {
    for (const double cost : costs) sums_.push_back(sums_.back() + cost);
  }
  [[nodiscard]] std::size_t count() const { return sums_.size() - 1; }
  [[nodiscard]] double cost(std::size_t begin, std::size_t end) const { return sums_[end] - sums_[begin]; }

 private:
  std::vector<double> sums_{0.0};
};

/// The least largest sum of a chunk.
double least_largest(const Runs& runs, std::size_t chunks) {
  std::vector<double> least(runs.count() + 1);  // of the first chunks, which end at this layer
  for (std::size_t end = 0; end <= runs.count(); ++end) least[end] = runs.cost(0, end);
  for (std::size_t chunk = 1; chunk < chunks; ++chunk) {
    std::vector<double> next(runs.count() + 1, kNoCut);
    for (std::size_t end = chunk + 1; end <= runs.count(); ++end) {
      for (std::size_t begin = chunk; begin < end; ++begin)
        next[end] = std::min(next[end], std::max(least[begin], runs.cost(begin, end)));
    }
    least = std::move(next);
  }
  return least.back();
}

void require_layer_each(std::size_t layers, int chunks) {
  ZR_CHECK(chunks >= 1 && layers >= static_cast<std::size_t>(chunks), ErrorCode::kUsage,
           "every chunk of a pipeline needs a layer",
           {.where = "program.cut_layers",
            .which = std::to_string(chunks) + " chunks",
            .expected = "1 to " + std::to_string(layers) + " chunks, for so many layers",
            .got = std::to_string(chunks)});
}

void check(std::span<const double> costs, int chunks) {
  require_layer_each(costs.size(), chunks);
  for (std::size_t layer = 0; layer < costs.size(); ++layer) {
    ZR_CHECK(std::isfinite(costs[layer]) && costs[layer] >= 0, ErrorCode::kUsage, "the cost of a layer is not usable",
             {.where = "program.cut_layers",
              .which = "layer " + std::to_string(layer),
              .expected = "a finite number from 0",
              .got = std::to_string(costs[layer])});
  }
}

}  // namespace

std::vector<int> cut_layers(std::span<const double> costs, int chunks) {
  check(costs, chunks);
  const Runs runs(costs);
  const auto parts = static_cast<std::size_t>(chunks);
  const double limit = least_largest(runs, parts);
  const auto square = [&](std::size_t begin, std::size_t end) {
    const double cost = runs.cost(begin, end);
    return cost <= limit ? cost * cost : kNoCut;
  };
  std::vector<double> squares(runs.count() + 1, kNoCut);  // least sum of the first chunks, which end at this layer
  for (std::size_t end = 1; end <= runs.count(); ++end) squares[end] = square(0, end);
  std::vector<std::vector<std::size_t>> begins(parts);  // of the last of these chunks
  for (std::size_t chunk = 1; chunk < parts; ++chunk) {
    std::vector<double> next(runs.count() + 1, kNoCut);
    begins[chunk].assign(runs.count() + 1, 0);
    for (std::size_t end = chunk + 1; end <= runs.count(); ++end) {
      for (std::size_t begin = chunk; begin < end; ++begin) {
        const double sum = squares[begin] + square(begin, end);
        if (sum >= next[end]) continue;
        next[end] = sum;
        begins[chunk][end] = begin;
      }
    }
    squares = std::move(next);
  }
  std::vector<int> bounds(parts + 1);
  std::size_t end = runs.count();
  for (std::size_t chunk = parts; chunk-- > 0;) {
    bounds[chunk + 1] = static_cast<int>(end);
    end = chunk > 0 ? begins[chunk][end] : 0;
  }
  return bounds;
}

std::vector<int> cut_evenly(int layers, int chunks) {
  require_layer_each(layers < 0 ? 0 : static_cast<std::size_t>(layers), chunks);
  std::vector<int> bounds{0};
  for (int chunk = 0; chunk < chunks; ++chunk)
    bounds.push_back(bounds.back() + layers / chunks + (chunk < layers % chunks ? 1 : 0));
  return bounds;
}

}  // namespace zeroth
