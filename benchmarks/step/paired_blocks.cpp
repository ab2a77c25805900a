#include "step/paired_blocks.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <span>

namespace zeroth::benchmarks {
namespace {

// What a rank tells the others about a block: wall and CPU of the whole, then of each phase.
constexpr std::size_t kFields = 2 + 2 * kNumPhases;

BlockTime run_block(Contestant& contestant, int steps, const Communicator& communicator) {
  PhaseTimes phases{};
  communicator.barrier();
  const Times start = now();
  for (int i = 0; i < steps; ++i) contestant.step(phases);
  const Times whole = since(start);

  const auto world = static_cast<std::size_t>(communicator.size());
  std::vector<double> table(world * kFields, 0.0);
  double* mine = table.data() + static_cast<std::size_t>(communicator.rank()) * kFields;
  *mine++ = whole.wall;
  *mine++ = whole.cpu;
  for (const Times& phase : phases) {
    *mine++ = phase.wall;
    *mine++ = phase.cpu;
  }
  communicator.all_reduce(std::span<double>(table));

  BlockTime block;
  const auto count = static_cast<double>(steps);
  for (std::size_t rank = 0; rank < world; ++rank) {
    const double* row = table.data() + rank * kFields;
    block.wall = std::max(block.wall, row[0] / count);
    block.cpu += row[1] / count;
    for (std::size_t phase = 0; phase < kNumPhases; ++phase) {
      block.phase_wall[phase] += row[2 + 2 * phase] / count / static_cast<double>(world);
      block.phase_cpu[phase] += row[3 + 2 * phase] / count;
    }
  }
  return block;
}

BlockTime mean(const BlockTime& a, const BlockTime& b) {
  BlockTime result{.wall = (a.wall + b.wall) / 2, .cpu = (a.cpu + b.cpu) / 2};
  for (std::size_t phase = 0; phase < kNumPhases; ++phase) {
    result.phase_wall[phase] = (a.phase_wall[phase] + b.phase_wall[phase]) / 2;
    result.phase_cpu[phase] = (a.phase_cpu[phase] + b.phase_cpu[phase]) / 2;
  }
  return result;
}

double sum_over_ranks(double value, const Communicator& communicator) {
  communicator.all_reduce(std::span<double>(&value, 1));
  return value;
}

void tell(const PairedResult& result, std::size_t cycle, int cycles) {
  std::fprintf(stderr, "cycle %zu/%d:", cycle + 1, cycles);
  for (std::size_t i = 0; i < result.names.size(); ++i) {
    std::fprintf(stderr, "  %s %.1f ms", result.names[i].c_str(), 1e3 * result.cycles[cycle][i].wall);
  }
  std::fprintf(stderr, "\n");
}

}  // namespace

std::string_view name_of(Phase phase) {
  switch (phase) {
    case Phase::kForward:
      return "forward";
    case Phase::kBackward:
      return "backward";
    case Phase::kStep:
      return "step";
  }
  return "";
}

Times& Times::operator+=(const Times& other) {
  wall += other.wall;
  cpu += other.cpu;
  return *this;
}

Times now() {
  timespec cpu{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
  const auto wall = std::chrono::steady_clock::now().time_since_epoch();
  return {.wall = std::chrono::duration<double>(wall).count(),
          .cpu = static_cast<double>(cpu.tv_sec) + 1e-9 * static_cast<double>(cpu.tv_nsec)};
}

Times since(const Times& start) {
  const Times end = now();
  return {.wall = end.wall - start.wall, .cpu = end.cpu - start.cpu};
}

Summary PairedResult::absolute(std::size_t contestant, Field field, double scale) const {
  std::vector<double> values;
  for (const auto& cycle : cycles) values.push_back(scale * field(cycle[contestant]));
  return summarise(values);
}

Summary PairedResult::percent_over_floor(std::size_t contestant, Field field) const {
  std::vector<double> values;
  for (const auto& cycle : cycles) values.push_back(100.0 * (field(cycle[contestant]) / field(cycle[0]) - 1.0));
  return summarise(values);
}

Summary PairedResult::over_floor(std::size_t contestant, Field field, double scale) const {
  std::vector<double> values;
  for (const auto& cycle : cycles) values.push_back(scale * (field(cycle[contestant]) - field(cycle[0])));
  return summarise(values);
}

void add_options(CLI::App& app, PairedOptions& options) {
  app.add_option("--cycles,--blocks", options.cycles, "cycles A B C C B A")->check(CLI::PositiveNumber);
  app.add_option("--steps-per-block", options.steps_per_block)->check(CLI::PositiveNumber);
  app.add_option("--max-seconds", options.max_seconds, "start no new cycle after this time");
}

PairedResult run_paired(const std::vector<std::unique_ptr<Contestant>>& contestants, const PairedOptions& options,
                        const Communicator& communicator) {
  PairedResult result;
  for (const auto& contestant : contestants) {
    result.names.push_back(contestant->name());
    PhaseTimes ignored{};
    for (int i = 0; i < options.warmup_steps; ++i) contestant->step(ignored);
  }
  const Times start = now();
  const std::size_t count = contestants.size();
  for (int cycle = 0; cycle < options.cycles; ++cycle) {
    std::vector<BlockTime> first(count);
    std::vector<BlockTime> both(count);
    for (std::size_t i = 0; i < count; ++i) {
      first[i] = run_block(*contestants[i], options.steps_per_block, communicator);
    }
    for (std::size_t i = count; i-- > 0;) {
      both[i] = mean(first[i], run_block(*contestants[i], options.steps_per_block, communicator));
    }
    result.cycles.push_back(std::move(both));
    if (options.progress && communicator.rank() == 0) {
      tell(result, static_cast<std::size_t>(cycle), options.cycles);
    }
    // The mean over ranks of the time, so that all of them stop after the same cycle.
    const double seconds = sum_over_ranks(since(start).wall, communicator) / static_cast<double>(communicator.size());
    if (options.max_seconds > 0.0 && seconds > options.max_seconds) break;
  }
  result.own_cpu_seconds = sum_over_ranks(since(start).cpu, communicator);
  return result;
}

}  // namespace zeroth::benchmarks
