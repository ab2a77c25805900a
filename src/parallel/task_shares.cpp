#include <zeroth/base/error.h>
#include <zeroth/parallel/task_shares.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string>

namespace zeroth {
namespace {

void require_task(bool holds, const char* which, std::string expected, std::string got) {
  if (holds) return;
  throw Error(
      ErrorCode::kUsage, "there is no such plan of tasks",
      {.where = "parallel.share_tasks", .which = which, .expected = std::move(expected), .got = std::move(got)});
}

/// The most that a rank has if tasks above `bound` are split, with the plan; infinite where ranks do not suffice.
double plan_below(double bound, std::span<const double> loads, const std::vector<std::size_t>& by_size, int ranks,
                  std::vector<std::vector<TaskPart>>& plan) {
  plan.assign(static_cast<std::size_t>(ranks), {});
  std::vector<double> sums(plan.size(), 0.0);
  std::size_t taken = 0;  // ranks of split tasks
  double most = 0.0;
  for (const std::size_t task : by_size) {
    const double load = loads[task];
    const auto number = static_cast<int>(task);
    if (load > bound) {
      int parts = 2;
      while (parts <= ranks && load / parts > bound) ++parts;
      if (taken + static_cast<std::size_t>(parts) > plan.size()) return std::numeric_limits<double>::infinity();
      for (int part = 0; part < parts; ++part) plan[taken++] = {{.task = number, .part = part, .parts = parts}};
      most = std::max(most, load / parts);
      continue;
    }
    if (taken == plan.size()) return std::numeric_limits<double>::infinity();
    const auto least = std::min_element(sums.begin() + static_cast<std::ptrdiff_t>(taken), sums.end());
    *least += load;
    plan[static_cast<std::size_t>(least - sums.begin())].push_back({.task = number});
    most = std::max(most, *least);
  }
  return most;
}

}  // namespace

std::vector<std::vector<TaskPart>> share_tasks(std::span<const double> loads, int ranks) {
  require_task(!loads.empty(), "loads", "one task or more", "none");
  require_task(ranks >= 1, "ranks", "1 or more", std::to_string(ranks));
  std::vector<std::size_t> by_size(loads.size());
  std::iota(by_size.begin(), by_size.end(), std::size_t{0});
  std::ranges::stable_sort(by_size, [&](std::size_t one, std::size_t other) { return loads[one] > loads[other]; });
  std::vector<std::vector<TaskPart>> best, plan;
  double least = std::numeric_limits<double>::infinity();
  for (const double load : loads) {
    require_task(load > 0 && std::isfinite(load), "loads", "above 0, and finite", std::to_string(load));
    for (int parts = 1; parts <= ranks; ++parts) {
      const double most = plan_below(load / parts, loads, by_size, ranks, plan);
      if (most < least) {
        least = most;
        best = plan;
      }
    }
  }
  for (auto& of_rank : best) std::ranges::sort(of_rank, {}, &TaskPart::task);
  return best;
}

}  // namespace zeroth
