// The whole step phase of one rank, Engine::step(): exact norm, commit vote, AdamW, publication. Against the streaming
// kernel of AdamW's own traffic in the same process, in paired blocks. What it takes longer is given in bytes a
// parameter at the speed of that kernel: the norm reads the gradients once (4 B), the 16-bit copy is written once (2
// B).
//
// Run: step_phase_bench [--params N] [--units N] [--rounds N] [--threads T ...] [--json FILE]
#include "kernels/bench_support.h"
#include "kernels/stream.h"
#include "step/flat_training.h"
#include "support/record.h"

#include <CLI/CLI.hpp>

#include <cstdio>

namespace {

using namespace zeroth;              // NOLINT(google-build-using-namespace)
using namespace zeroth::benchmarks;  // NOLINT(google-build-using-namespace)

struct Options {
  std::int64_t params = 50'331'648;
  int units = 16;
  int rounds = 15;
  std::vector<int> threads{1, 2};
  std::string json;
};

FlatTraining training_of(const Options& options, DType dtype, int zero_stage, int threads) {
  EngineSettings settings;
  settings.plan = zero_plan(zero_stage, {"dp"});
  settings.threads = threads;
  return {options.params, options.units, dtype, make_cpu_device(), std::move(settings)};
}

void measure(const Options& options, Record& record) {
  const auto bytes = static_cast<std::size_t>(options.params) * sizeof(float);
  benchmarks::Arena arrays(4 * bytes, Pages::kHuge);
  const volatile float hidden_zero = 0.0F;
  const StreamArrays a{arrays.as<float>(), arrays.as<float>(bytes), arrays.as<float>(2 * bytes),
                       arrays.as<float>(3 * bytes), hidden_zero};
  std::fill_n(arrays.as<float>(), 4 * options.params, 0.5F);
  StreamKernel* const stream = stream_kernel(kernels::best_isa());
  for (const int num_threads : options.threads) {
    const std::int64_t share = options.params / num_threads;
    const auto time_stream = [&] {
      Team team(num_threads);  // its threads spin: they must not be there while the engine works
      return team.time([&](int rank) { stream(a, rank * share, (rank + 1) * share); });
    };
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const int zero_stage : {0, 3}) {
        FlatTraining training = training_of(options, dtype, zero_stage, num_threads);
        const Paired paired = run_paired(options.rounds, [&] { return training.time_step(); }, time_stream);
        std::vector<double> above;
        for (const double ratio : paired.ratio) above.push_back(kStreamBytes * (ratio - 1));
        const std::string name = "step phase, stage " + std::to_string(zero_stage) + ", " +
                                 std::string(name_of(dtype)) + ", " + std::to_string(num_threads) +
                                 (num_threads == 1 ? " thread" : " threads");
        record.add({name, "ms", summarise(paired.a), Better::kLower, {}});
        record.add({name + ", stream beside it", "ms", summarise(paired.b), Better::kNone, {}});
        record.add({name + ", above the stream", "B/parameter", summarise(above), Better::kLower,
                    dtype == DType::kFloat32 ? 4.0 : 6.0});
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"The step phase against a streaming kernel of AdamW's traffic"};
  app.add_option("--params", options.params, "elements")
      ->check(CLI::Range(std::int64_t{1} << 20, std::int64_t{1} << 34));
  app.add_option("--units", options.units, "units of equal size")->check(CLI::Range(1, 1000));
  app.add_option("--rounds", options.rounds, "A B B A blocks")->check(CLI::Range(1, 1000));
  app.add_option("--threads", options.threads, "numbers of threads");
  app.add_option("--json", options.json, "file for the result");
  CLI11_PARSE(app, argc, argv);
  Record record("step/phase", argc, argv);
  record.setting("params", options.params);
  record.setting("units", options.units);
  record.note(
      "above the stream: 28 B x (step phase / stream - 1); the stream moves 28 B a parameter; one rank, no clipping");
  measure(options, record);
  std::printf("%s", record.table().c_str());
  record.write(options.json);
  return 0;
}
