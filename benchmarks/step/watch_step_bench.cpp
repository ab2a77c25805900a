// What the flight recorder, the watch over waits and the control plane cost a training step while nothing is wrong: an
// engine that has them beside one of the same job that has not, in paired blocks.
//
//   zeroth-run -n 2 watch_step_bench --size 3m --plan 2 --cycles 60 --json watch-step.json
//
// The floor is the engine without; a second one says how far equal things differ. The control plane's thread runs
// beside all of them: what it takes is what a rank takes that does nothing, a row of its own.
#include "engine/unwatched.h"
#include "step/gpt_contestants.h"
#include "step/job.h"
#include "support/record.h"

#include <CLI/CLI.hpp>
#include <torch/version.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::benchmarks {
namespace {

struct Options {
  GptCase gpt_case{};
  int plan = 2;
  PairedOptions paired{};
  std::string json{};
};

double wall(const BlockTime& block) {
  return block.wall;
}
double cpu(const BlockTime& block) {
  return block.cpu;
}

void run(const Options& options, const World& world, int argc, const char* const* argv) {
  Record record("step/watch", argc, argv, launcher_prefix(world));
  const Communicator communicator = make_bench_communicator(world);
  const auto batches = std::make_shared<const Batches>(options.gpt_case, world.rank());
  const World unwatched = detail::unwatched(world);
  std::vector<std::unique_ptr<Contestant>> contestants;
  const auto add = [&](std::string name, const World& ranks) {
    contestants.push_back(std::make_unique<EngineGpt>(options.gpt_case, options.plan, batches, ranks, std::move(name)));
  };
  add("unwatched", unwatched);
  add("second unwatched", unwatched);
  add("watched", world);
  communicator.barrier();
  const Times idle = now();
  std::this_thread::sleep_for(std::chrono::seconds{5});
  const Times slept = since(idle);
  PairedOptions paired = options.paired;
  paired.progress = true;
  const PairedResult result = run_paired(contestants, paired, communicator);
  if (world.rank() != 0) return;
  record.version("torch", TORCH_VERSION);
  record.setting("size", options.gpt_case.size);
  record.setting("ranks", world.size());
  record.setting("dtype", options.gpt_case.dtype);
  record.setting("micro_batch", options.gpt_case.micro_batch);
  record.setting("seq", options.gpt_case.seq);
  record.setting("accumulate", options.gpt_case.accumulate);
  record.setting("reshard", options.gpt_case.reshard);
  record.setting("plan", options.plan);
  record.setting("cycles", result.cycles.size());
  record.setting("steps_per_block", paired.steps_per_block);
  record.setting("threads_per_rank", 1);
  record.set_own_cpu_seconds(result.own_cpu_seconds);
  record.add({"unwatched wall", "ms", result.absolute(0, wall, 1e3)});
  record.add({"unwatched CPU, all ranks", "ms", result.absolute(0, cpu, 1e3)});
  record.add({"second unwatched over unwatched, wall", "%", result.percent_over_floor(1, wall)});
  record.add({"second unwatched over unwatched, CPU", "%", result.percent_over_floor(1, cpu)});
  record.add({.name = "watched over unwatched, wall",
              .unit = "%",
              .summary = result.percent_over_floor(2, wall),
              .better = Better::kLower,
              .bar = 0.5});
  record.add({.name = "watched over unwatched, CPU",
              .unit = "%",
              .summary = result.percent_over_floor(2, cpu),
              .better = Better::kLower,
              .bar = 0.5});
  record.add({.name = "a rank that sleeps, CPU",
              .unit = "% of a core",
              .summary = summarise({100 * slept.cpu / slept.wall}),
              .better = Better::kLower,
              .bar = 0.5});
  std::printf("%s", record.table().c_str());
  record.write(options.json);
}

}  // namespace
}  // namespace zeroth::benchmarks

int main(int argc, char** argv) {
  using namespace zeroth::benchmarks;
  Options options;
  CLI::App app{"Cost of the watch over a step"};
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  add_options(app, options.gpt_case);
  app.add_option("--plan,--zero-stage", options.plan, "ZeRO stage")->check(CLI::Range(0, 3));
  add_options(app, options.paired);
  app.add_option("--json", options.json, "file for the result");
  CLI11_PARSE(app, argc, argv);
  return run_job([&](const zeroth::World& world) { run(options, world, argc, argv); });
}
