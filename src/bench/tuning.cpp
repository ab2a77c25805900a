#include "bench/tuning.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace zeroth::bench {
namespace {

/// Of several timings of one kind: the first backend, or the one that takes least time.
const std::string& fastest(const std::vector<const Timing*>& timings, const std::vector<std::string>& backends,
                           double gain) {
  const auto logarithms = [&](const std::string& backend) {
    double sum = 0;
    for (const Timing* timing : timings) sum += std::log(median(timing->microseconds.at(backend)));
    return sum / static_cast<double>(timings.size());
  };
  const std::string* best = &backends.front();
  double least = logarithms(*best) + std::log1p(-gain);
  for (const std::string& backend : backends) {
    if (&backend == &backends.front()) continue;
    if (const double time = logarithms(backend); time < least) {
      least = time;
      best = &backend;
    }
  }
  return *best;
}

}  // namespace

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

CallTable choose(const std::vector<Timing>& timings, const std::vector<std::string>& backends, double gain) {
  std::vector<CallTable::Row> rows;
  for (std::size_t index = 0; index < kNumCollectiveKinds; ++index) {
    const auto kind = static_cast<CollectiveKind>(index);
    std::vector<const Timing*> of_kind;
    for (const Timing& timing : timings) {
      if (timing.kind == kind) of_kind.push_back(&timing);
    }
    if (of_kind.empty()) continue;
    std::ranges::sort(of_kind, {}, &Timing::bytes);
    if (kind == CollectiveKind::kSend || kind == CollectiveKind::kBarrier) {
      rows.push_back({.kind = kind, .up_to_bytes = CallTable::kNoBound, .backend = fastest(of_kind, backends, gain)});
      continue;
    }
    const std::size_t begin = rows.size();
    for (std::size_t at = 0; at < of_kind.size(); ++at) {
      const std::string& backend = fastest({of_kind[at]}, backends, gain);
      if (rows.size() > begin && rows.back().backend == backend) continue;
      if (rows.size() > begin) {
        const double between =
            std::sqrt(static_cast<double>(of_kind[at - 1]->bytes) * static_cast<double>(of_kind[at]->bytes));
        rows.back().up_to_bytes = static_cast<std::uint64_t>(between);
      }
      rows.push_back({.kind = kind, .up_to_bytes = CallTable::kNoBound, .backend = backend});
    }
  }
  return CallTable(std::move(rows));
}

}  // namespace zeroth::bench
