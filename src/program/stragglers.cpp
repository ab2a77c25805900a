#include <zeroth/base/error.h>
#include <zeroth/program/stragglers.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <random>
#include <string>

namespace zeroth {
namespace {

constexpr const char* kSimulation = "program.stragglers";

/// Number of workers.
std::size_t workers_of_steps(std::span<const std::vector<double>> delays, int stragglers) {
  ZR_CHECK(!delays.empty(), ErrorCode::kUsage, "a simulation of no steps", {.where = kSimulation});
  const std::size_t workers = delays.front().size();
  for (const auto& step : delays) {
    ZR_CHECK(step.size() == workers, ErrorCode::kUsage, "steps of different workers",
             {.where = kSimulation, .expected = std::to_string(workers), .got = std::to_string(step.size())});
  }
  ZR_CHECK(stragglers >= 0 && static_cast<std::size_t>(stragglers) < workers, ErrorCode::kUsage,
           "no code has so many stragglers",
           {.where = kSimulation,
            .expected = "less than " + std::to_string(workers) + " workers",
            .got = std::to_string(stragglers)});
  return workers;
}

/// From 0 to below 1, the same with every library.
double uniform(std::mt19937_64& random) {
  return static_cast<double>(random() >> 11U) * 0x1p-53;
}

/// Workers by the time of their answers.
std::vector<std::size_t> in_order(const std::vector<double>& delays) {
  std::vector<std::size_t> workers(delays.size());
  std::iota(workers.begin(), workers.end(), std::size_t{0});
  std::stable_sort(workers.begin(), workers.end(), [&](auto a, auto b) { return delays[a] < delays[b]; });
  return workers;
}

/// The answers for one step's gradient.
struct Answers {
  std::vector<bool> has;
  std::size_t count = 0;

  void take(std::size_t worker) {
    has[worker] = true;
    ++count;
  }
};

}  // namespace

std::vector<std::vector<double>> straggler_delays(const StragglerModel& model, int workers, int steps,
                                                  std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<bool> slow(static_cast<std::size_t>(workers), false);
  std::vector<std::vector<double>> delays(static_cast<std::size_t>(steps));
  for (auto& step : delays) {
    for (std::size_t worker = 0; worker < slow.size(); ++worker) {
      const double chance = uniform(random);
      slow[worker] = slow[worker] ? chance >= model.recovers : chance < model.becomes_slow;
      const double u = 1.0 - uniform(random);
      step.push_back(slow[worker] ? model.scale * std::pow(u, -1.0 / model.shape) : 0.0);
    }
  }
  return delays;
}

double plain_step_time(std::span<const std::vector<double>> delays) {
  return coded_step_time(delays, 0);
}

double coded_step_time(std::span<const std::vector<double>> delays, int stragglers) {
  const std::size_t workers = workers_of_steps(delays, stragglers);
  const double load = (stragglers + 1.0) / static_cast<double>(workers);
  double sum = 0.0;
  for (const auto& step : delays)
    sum += load + step[in_order(step)[workers - 1 - static_cast<std::size_t>(stragglers)]];
  return sum / static_cast<double>(delays.size());
}

double sequential_step_time(std::span<const std::vector<double>> delays, const SequentialCode& code) {
  const std::size_t workers = workers_of_steps(delays, code.stragglers);
  ZR_CHECK(code.most_missing >= code.stragglers && static_cast<std::size_t>(code.most_missing) < workers &&
               code.delay >= 1 && static_cast<std::size_t>(code.delay) < delays.size(),
           ErrorCode::kUsage, "no such sequential code",
           {.where = kSimulation,
            .expected = std::to_string(code.stragglers) + " to " + std::to_string(workers - 1) +
                        " missing workers, and a delay below " + std::to_string(delays.size()),
            .got = std::to_string(code.most_missing) + " with a delay of " + std::to_string(code.delay)});
  const auto enough = workers - static_cast<std::size_t>(code.stragglers);
  const auto most_missing = static_cast<std::size_t>(code.most_missing);
  const auto delay = static_cast<std::size_t>(code.delay);
  const std::size_t steps = delays.size() - delay;
  const double load = (code.stragglers + 1.0) / static_cast<double>(workers);
  std::vector<Answers> answers(steps, Answers{std::vector<bool>(workers, false)});
  double sum = 0.0;
  for (std::size_t now = 0; now < delays.size(); ++now) {
    // Who works for which step.
    Answers* const old = now >= delay ? &answers[now - delay] : nullptr;
    std::size_t lacks = old != nullptr && old->count < enough ? enough - old->count : 0;
    std::vector<bool> repeats(workers, false);
    for (std::size_t worker = 0, left = lacks; worker < workers && left > 0; ++worker) {
      if (old->has[worker]) continue;
      repeats[worker] = true;
      --left;
    }
    const bool is_last = now >= steps;  // no new gradient
    if (is_last && lacks == 0) continue;
    // Answers come until both steps have what they need; those of the same time count.
    double end = 0.0;
    std::size_t missing = workers;
    for (const std::size_t worker : in_order(delays[now])) {
      const bool is_done = lacks == 0 && (is_last || missing <= most_missing);
      if (is_done && delays[now][worker] > end) break;
      end = delays[now][worker];
      --missing;
      if (repeats[worker]) {
        old->take(worker);
        --lacks;
      } else if (!is_last) {
        answers[now].take(worker);
      }
    }
    sum += load + end;
  }
  for (const Answers& one : answers) ZR_ASSERT(one.count >= enough, "a gradient is not complete");
  return sum / static_cast<double>(steps);
}

}  // namespace zeroth
