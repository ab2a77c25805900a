#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/offload/plan_split.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace zeroth {
namespace {

constexpr int kChoices = 64;
constexpr double kSame = 1e-9;  // relative: times that differ less are equal

/// Times at which the resources of a pipeline are free again, and the ends of the last transfers out of its slots.
/// Later is never better: a choice whose times are all at most another's stays at least as good.
struct Times {
  std::vector<double> at{};
  [[nodiscard]] bool at_most(const Times& other) const {
    for (std::size_t index = 0; index < at.size(); ++index) {
      if (at[index] > other.at[index]) return false;
    }
    return true;
  }
};

/// An update of files: [0] processor, [1] reads, [2] writes, [3...] when the slots are free, first one first.
struct TierPipeline {
  const TierSplitProblem& problem;

  [[nodiscard]] Times begin() const {
    Times times;
    times.at.assign(static_cast<std::size_t>(3 + problem.slots), -problem.ahead_s);
    times.at[0] = 0.0;
    return times;
  }
  [[nodiscard]] double read_end(const Times& times) const {
    return std::max(times.at[1], times.at[3]) + problem.read_s;
  }
  void add(Times& times, bool in_files) const {
    auto& [at] = times;
    if (in_files) {
      at[1] = read_end(times);
      at[0] = std::max(at[0], at[1]) + problem.update_s;
      at[2] = std::max(at[2], at[0]) + problem.write_s;
      std::rotate(at.begin() + 3, at.begin() + 4, at.end());
      at.back() = at[2];
    } else {
      at[0] += problem.update_s;
    }
  }
  [[nodiscard]] double end(const Times& times) const { return std::max(times.at[0], times.at[2] - problem.behind_s); }
  /// How long the processor would wait for the next block of the slower kind, in blocks of the other.
  [[nodiscard]] double wait(const Times& times) const {
    return (read_end(times) - times.at[0]) / std::max(problem.update_s, std::numeric_limits<double>::min());
  }
};

/// Two processors: [0] host, [1] device, [2] link to the device, [3] link back, [4...] when the slots are free.
struct ProcessorPipeline {
  const ProcessorSplitProblem& problem;

  [[nodiscard]] Times begin() const {
    Times times;
    times.at.assign(static_cast<std::size_t>(4 + problem.slots), 0.0);
    return times;
  }
  void add(Times& times, bool on_device) const {
    auto& [at] = times;
    if (on_device) {
      at[2] = std::max(at[2], at[4]) + problem.fetch_s;
      at[1] = std::max(at[1], at[2]) + problem.device_update_s;
      at[3] = std::max(at[3], at[1]) + problem.return_s;
      std::rotate(at.begin() + 4, at.begin() + 5, at.end());
      at.back() = at[3];
    } else {
      at[0] += problem.host_update_s;
      at[2] = std::max(at[2], at[0]) + problem.upload_s;
    }
  }
  [[nodiscard]] double end(const Times& times) const { return *std::max_element(times.at.begin(), times.at.end()); }
  /// How far the device's fetch would end behind the host's next block.
  [[nodiscard]] double wait(const Times& times) const {
    return (std::max(times.at[2], times.at[4]) + problem.fetch_s + problem.device_update_s - times.at[0]) /
           std::max(problem.host_update_s, std::numeric_limits<double>::min());
  }
};

template <class Pipeline>
double time_of(const Pipeline& pipeline, const std::vector<bool>& choice) {
  Times times = pipeline.begin();
  for (const bool slow : choice) pipeline.add(times, slow);
  return pipeline.end(times);
}

struct Found {
  std::vector<bool> choice{};
  double end = std::numeric_limits<double>::infinity();
};

/// The best order of k blocks of the second kind among n, for each k: all orders, without those that another one with
/// the same counts is never later than.
template <class Pipeline>
std::vector<Found> best_of_all(const Pipeline& pipeline, int n) {
  struct Partial {
    Times times;
    std::vector<bool> choice;
  };
  std::vector<std::vector<Partial>> fronts(1, {{pipeline.begin(), {}}});
  for (int block = 0; block < n; ++block) {
    std::vector<std::vector<Partial>> next(fronts.size() + 1);
    for (std::size_t count = 0; count < fronts.size(); ++count) {
      for (const Partial& partial : fronts[count]) {
        for (const bool second : {false, true}) {
          Partial grown = partial;
          pipeline.add(grown.times, second);
          grown.choice.push_back(second);
          std::vector<Partial>& front = next[count + (second ? 1 : 0)];
          const auto beaten_by = [&grown](const Partial& other) { return other.times.at_most(grown.times); };
          if (std::ranges::any_of(front, beaten_by)) continue;
          std::erase_if(front, [&grown](const Partial& other) { return grown.times.at_most(other.times); });
          front.push_back(std::move(grown));
        }
      }
    }
    fronts = std::move(next);
  }
  std::vector<Found> best(fronts.size());
  for (std::size_t count = 0; count < fronts.size(); ++count) {
    for (const Partial& partial : fronts[count]) {
      const double end = pipeline.end(partial.times);
      if (end < best[count].end) best[count] = {partial.choice, end};
    }
  }
  return best;
}

/// k of n, evenly: the n-th of `phase` = 0 is the last, with `phase` near 1 the first is one of them.
std::vector<bool> evenly(int n, int k, double phase) {
  std::vector<bool> choice;
  for (int block = 0; block < n; ++block) {
    const auto until = [&](int end) { return std::floor(static_cast<double>(std::int64_t{end} * k) / n + phase); };
    choice.push_back(until(block + 1) > until(block));
  }
  return choice;
}

/// The second kind whenever it would make the processor wait for at most `patience` blocks of the first kind.
template <class Pipeline>
std::vector<bool> as_it_comes(const Pipeline& pipeline, int n, int k, double patience) {
  std::vector<bool> choice;
  Times times = pipeline.begin();
  for (int first = n - k, second = k; first + second > 0;) {
    const bool take = second > 0 && (first == 0 || pipeline.wait(times) <= patience);
    pipeline.add(times, take);
    choice.push_back(take);
    (take ? second : first) -= 1;
  }
  return choice;
}

template <class Pipeline>
Found best_of_steady(const Pipeline& pipeline, int n, int k) {
  Found best;
  const auto consider = [&](std::vector<bool> choice) {
    const double end = time_of(pipeline, choice);
    if (end < best.end) best = {std::move(choice), end};
  };
  for (const double phase : {0.0, 0.5, 1.0 - 1e-9}) consider(evenly(n, k, phase));
  for (const double patience : {0.0, 0.25, 0.5, 0.75, 1.0}) consider(as_it_comes(pipeline, n, k, patience));
  return best;
}

/// Counts of the second kind that are looked at.
std::vector<int> counts_of(int n) {
  std::vector<int> counts;
  for (int step = 0; step <= kChoices; ++step)
    counts.push_back(static_cast<int>(std::int64_t{n} * step / std::int64_t{kChoices}));
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  return counts;
}

void require_times(const char* where, int blocks, int slots, std::initializer_list<double> times) {
  ZR_CHECK(blocks >= 1 && slots >= 2, ErrorCode::kUsage, "a split of states has too few blocks or slots",
           {.where = where,
            .expected = "1 block and 2 slots at least",
            .got = std::to_string(blocks) + " and " + std::to_string(slots)});
  ZR_CHECK(std::ranges::all_of(times, [](double time) { return std::isfinite(time) && time >= 0.0; }),
           ErrorCode::kUsage, "a time of a split of states is negative or not finite", {.where = where});
}

std::string milliseconds(double seconds) {
  return fmt::format("{:.3g} ms", seconds * 1e3);
}

std::string why_of(const TierSplitProblem& problem, const TierSplit& chosen, double resident_s, double all_files_s) {
  const std::uint64_t resident = problem.memory_of.front();
  const std::string limit = problem.limit.empty() ? format_bytes(problem.memory_bytes) : problem.limit;
  if (!chosen.fits) {
    return fmt::format("all {} blocks rest in files, and even so {} of memory are needed where {} are", problem.blocks,
                       format_bytes(chosen.memory_bytes), limit);
  }
  if (chosen.files == 0) {
    return fmt::format("all {} blocks stay in memory: with {} they fit into {}, and nothing is faster", problem.blocks,
                       format_bytes(resident), limit);
  }
  return fmt::format(
      "{} of {} blocks rest in files, the fewest that leave memory within {} ({} of it; all blocks would need {}); an "
      "update is expected to take {}, where all in memory would take {} and all in files {} (a block is read in {}, "
      "written in {}, updated in {})",
      chosen.files, problem.blocks, limit, format_bytes(chosen.memory_bytes), format_bytes(resident),
      milliseconds(chosen.step_s), milliseconds(resident_s), milliseconds(all_files_s), milliseconds(problem.read_s),
      milliseconds(problem.write_s), milliseconds(problem.update_s));
}

}  // namespace

double update_time(const TierSplitProblem& problem, const std::vector<bool>& in_files) {
  return time_of(TierPipeline{problem}, in_files);
}

double update_time(const ProcessorSplitProblem& problem, const std::vector<bool>& on_device) {
  return time_of(ProcessorPipeline{problem}, on_device);
}

TierSplitPlan plan_tier_split(const TierSplitProblem& problem) {
  require_times("offload.plan", problem.blocks, problem.slots,
                {problem.update_s, problem.read_s, problem.write_s, problem.ahead_s, problem.behind_s});
  ZR_CHECK(problem.memory_of.size() == static_cast<std::size_t>(problem.blocks) + 1, ErrorCode::kUsage,
           "a split of states does not say what each choice needs",
           {.where = "offload.plan",
            .expected = std::to_string(problem.blocks + 1) + " sizes",
            .got = std::to_string(problem.memory_of.size())});
  const TierPipeline pipeline{problem};
  TierSplitPlan plan;
  const auto add = [&](int files, Found found) {
    const std::uint64_t memory = problem.memory_of[static_cast<std::size_t>(files)];
    const bool fits = memory <= problem.memory_bytes && files >= problem.least_files;
    plan.choices.push_back({std::move(found.choice), files, found.end, memory, fits});
  };
  if (problem.blocks <= kExactBlocks) {
    std::vector<Found> best = best_of_all(pipeline, problem.blocks);
    for (int files = 0; files <= problem.blocks; ++files) add(files, std::move(best[static_cast<std::size_t>(files)]));
  } else {
    std::vector<int> counts = counts_of(problem.blocks);
    const auto fits =
        std::ranges::find_if(problem.memory_of, [&](auto bytes) { return bytes <= problem.memory_bytes; });
    if (fits != problem.memory_of.end()) counts.push_back(static_cast<int>(fits - problem.memory_of.begin()));
    counts.push_back(std::min(problem.least_files, problem.blocks));
    std::ranges::sort(counts);
    counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
    for (const int files : counts) add(files, best_of_steady(pipeline, problem.blocks, files));
  }
  plan.chosen = plan.choices.back();
  for (auto choice = plan.choices.rbegin(); choice != plan.choices.rend(); ++choice) {  // fewer blocks in files win
    if (!choice->fits) continue;
    if (!plan.chosen.fits || choice->step_s <= plan.chosen.step_s * (1.0 + kSame)) plan.chosen = *choice;
  }
  plan.why = why_of(problem, plan.chosen, plan.choices.front().step_s, plan.choices.back().step_s);
  return plan;
}

ProcessorSplitPlan plan_processor_split(const ProcessorSplitProblem& problem) {
  require_times("offload.plan", problem.blocks, problem.slots,
                {problem.host_update_s, problem.device_update_s, problem.fetch_s, problem.return_s, problem.upload_s});
  const ProcessorPipeline pipeline{problem};
  std::vector<Found> found;
  if (problem.blocks <= kExactBlocks) {
    found = best_of_all(pipeline, problem.blocks);
  } else {
    for (const int count : counts_of(problem.blocks)) found.push_back(best_of_steady(pipeline, problem.blocks, count));
  }
  Found* best = &found.front();
  for (Found& one : found) {
    if (one.end < best->end * (1.0 - kSame)) best = &one;
  }
  ProcessorSplitPlan plan{.on_device = best->choice,
                          .step_s = best->end,
                          .host_only_s = found.front().end,
                          .device_only_s = found.back().end};
  plan.why = fmt::format("{} of {} blocks are updated on the device: {} in all, {} by the host alone, {} by the device",
                         std::ranges::count(plan.on_device, true), problem.blocks, milliseconds(plan.step_s),
                         milliseconds(plan.host_only_s), milliseconds(plan.device_only_s));
  return plan;
}

}  // namespace zeroth
