// What a step costs beyond compute: engines of several ZeRO stages against plain torch, in paired blocks of
// one job.
//
//   zeroth-run -n 2 step_bench --size 25m --plans 0,1,2,3 --cycles 20 --json step.json
//
// Every rank holds the floor (see gpt_contestants.h) and one engine for each plan, all with the same model,
// data and number of threads (one). Printed are the overhead in wall time (slowest rank) and CPU time (all
// ranks), and where it arises: the differences of forward, backward and step() to the floor's, as the mean
// over ranks for wall time.
#include "step/gpt_contestants.h"
#include "step/job.h"
#include "support/record.h"

#include <zeroth/base/text.h>

#include <CLI/CLI.hpp>
#include <torch/version.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::benchmarks {
namespace {

struct Options {
  GptCase gpt_case{};
  std::vector<int> plans{0, 1, 2, 3};
  PairedOptions paired{};
  bool noise = false;
  bool keep_pages = false;
  std::string json{};
};

/// Upper bound of the overhead at 25 M parameters in fp32, percent.
double bar_of(int zero_stage) {
  return zero_stage == 3 ? 7.0 : 4.0;
}

template <Phase kPhase>
double phase_wall(const BlockTime& block) {
  return block.phase_wall[static_cast<std::size_t>(kPhase)];
}
template <Phase kPhase>
double phase_cpu(const BlockTime& block) {
  return block.phase_cpu[static_cast<std::size_t>(kPhase)];
}
double wall(const BlockTime& block) {
  return block.wall;
}
double cpu(const BlockTime& block) {
  return block.cpu;
}

template <Phase kPhase>
void add_phase(Record& record, const PairedResult& result, std::size_t contestant, double ranks) {
  const std::string name = result.names[contestant] + " " + std::string(name_of(kPhase));
  record.add(
      {name + " over floor, wall", "ms", result.over_floor(contestant, phase_wall<kPhase>, 1e3), Better::kLower});
  record.add({name + " over floor, CPU a rank", "ms", result.over_floor(contestant, phase_cpu<kPhase>, 1e3 / ranks),
              Better::kLower});
}

void add_rows(Record& record, const PairedResult& result, const Options& options, int ranks) {
  record.add({"floor wall", "ms", result.absolute(0, wall, 1e3)});
  record.add({"floor CPU, all ranks", "ms", result.absolute(0, cpu, 1e3)});
  record.add({"floor forward", "ms", result.absolute(0, phase_wall<Phase::kForward>, 1e3)});
  record.add({"floor backward", "ms", result.absolute(0, phase_wall<Phase::kBackward>, 1e3)});
  record.add({"floor step", "ms", result.absolute(0, phase_wall<Phase::kStep>, 1e3)});
  // 3m only shows that it works; to gather every unit twice is a choice that costs more.
  const bool has_bar = options.gpt_case.size != "3m" && options.gpt_case.reshard == "default";
  const std::size_t first_plan = options.noise ? 2 : 1;
  for (std::size_t i = 1; i < result.names.size(); ++i) {
    Row row{result.names[i] + " over floor, wall", "%", result.percent_over_floor(i, wall), Better::kLower};
    if (has_bar && i >= first_plan) row.bar = bar_of(options.plans[i - first_plan]);
    record.add(std::move(row));
    record.add({result.names[i] + " over floor, CPU", "%", result.percent_over_floor(i, cpu), Better::kLower});
  }
  for (std::size_t i = first_plan; i < result.names.size(); ++i) {
    record.add({result.names[i] + " wall", "ms", result.absolute(i, wall, 1e3), Better::kLower});
    add_phase<Phase::kForward>(record, result, i, ranks);
    add_phase<Phase::kBackward>(record, result, i, ranks);
    add_phase<Phase::kStep>(record, result, i, ranks);
  }
}

void run(const Options& options, const World& world, int argc, const char* const* argv) {
  Record record("step/overhead", argc, argv, launcher_prefix(world));
  const Communicator communicator = make_bench_communicator(world);
  const auto batches = std::make_shared<const Batches>(options.gpt_case, world.rank());
  std::vector<std::unique_ptr<Contestant>> contestants;
  contestants.push_back(make_floor(options.gpt_case, batches, "floor"));
  if (options.noise) contestants.push_back(make_floor(options.gpt_case, batches, "second floor"));
  std::vector<EngineGpt*> engines;
  for (const int zero_stage : options.plans) {
    auto contestant = std::make_unique<EngineGpt>(options.gpt_case, zero_stage, batches, world);
    engines.push_back(contestant.get());
    contestants.push_back(std::move(contestant));
  }
  PairedOptions paired = options.paired;
  paired.progress = true;
  const PairedResult result = run_paired(contestants, paired, communicator);

  const bool equal_bits = std::ranges::all_of(
      engines, [&](const EngineGpt* engine) { return engine->loss_digest() == engines.front()->loss_digest(); });
  if (world.rank() != 0) return;
  const GptCase& gpt_case = options.gpt_case;
  record.version("torch", TORCH_VERSION);
  record.setting("size", gpt_case.size);
  std::int64_t parameters = 0;
  if (!engines.empty()) {
    for (const torch::Tensor& param : engines.front()->engine().model()->parameters()) parameters += param.numel();
  }
  record.setting("parameters", parameters);
  record.setting("dtype", gpt_case.dtype);
  record.setting("ranks", world.size());
  record.setting("micro_batch", gpt_case.micro_batch);
  record.setting("seq", gpt_case.seq);
  record.setting("accumulate", gpt_case.accumulate);
  record.setting("reshard", gpt_case.reshard);
  record.setting("plans", options.plans);
  record.setting("cycles", result.cycles.size());
  record.setting("steps_per_block", paired.steps_per_block);
  record.setting("malloc", options.keep_pages ? "keep" : "default");
  record.setting("threads_per_rank", 1);
  record.set_own_cpu_seconds(result.own_cpu_seconds);
  add_rows(record, result, options, world.size());
  if (engines.size() > 1) {
    record.note(equal_bits ? "the losses of all plans had the same bits in every step of rank 0"
                           : "THE LOSSES OF THE PLANS DIFFERED IN THEIR BITS");
  }
  record.note("overheads are medians over cycles of (two blocks of the plan) / (two blocks of the floor)");
  std::printf("%s", record.table().c_str());
  record.write(options.json);
}

}  // namespace
}  // namespace zeroth::benchmarks

int main(int argc, char** argv) {
  using namespace zeroth::benchmarks;
  Options options;
  CLI::App app{"Overhead of a Zeroth step over plain torch"};
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  add_options(app, options.gpt_case);
  app.add_option("--plans,--zero-stage", options.plans, "ZeRO stages, each in an engine of its own")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->delimiter(',')
      ->check(CLI::Range(0, 3));
  add_options(app, options.paired);
  app.add_option("--warmup", options.paired.warmup_steps, "steps before")->check(CLI::NonNegativeNumber);
  app.add_flag("--noise", options.noise, "a second floor, to see how far equal things differ");
  app.add_flag("--keep-pages", options.keep_pages, "glibc's malloc never gives pages back");
  app.add_option("--json", options.json, "file for the result");
  CLI11_PARSE(app, argc, argv);
  set_malloc_mode(options.keep_pages ? MallocMode::kKeep : MallocMode::kDefault);
  return run_job([&](const zeroth::World& world) { run(options, world, argc, argv); });
}
