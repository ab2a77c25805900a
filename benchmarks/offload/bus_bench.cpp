// The step phase of one rank on a GPU, Engine::step(), with the states of the optimizer on the device and beside it:
// in host memory or in files. Beside each step stands the least that it may take:
//   on the device   28 B a parameter through its memory, at the speed of a copy inside of it
//   beside it       the slowest of: sums that come down, parameters that go up (each at the speed of one pinned copy
//                   that way), the host's own update of states that are in its memory
// And rows of a table in pinned memory of the host, which the device reads itself, against a pinned copy.
//
// Run: bus_bench [--params N] [--units N] [--rounds N] [--threads N] [--folder DIR] [--json FILE]
#include "step/flat_training.h"
#include "support/record.h"

#include <zeroth/compute/device_rows.h>
#include <zeroth/device/cuda.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace zeroth;              // NOLINT(google-build-using-namespace)
using namespace zeroth::benchmarks;  // NOLINT(google-build-using-namespace)

struct Options {
  std::int64_t params = std::int64_t{1} << 28;
  int units = 16;
  int rounds = 5;
  int threads = 8;
  std::int64_t block = std::int64_t{1} << 18;
  std::string folder;
  std::string json;
};

double milliseconds(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

std::vector<double> times(int rounds, const std::function<void()>& call) {
  call();  // what is made at the first use
  std::vector<double> all;
  for (int round = 0; round < rounds; ++round) all.push_back(milliseconds(call));
  return all;
}

/// Bytes a millisecond, each the median of several copies.
struct Speeds {
  double inside = 0;  ///< read and written
  double down = 0;
  double up = 0;
  double both = 0;  ///< down and up at once, together
};

Speeds speeds_of(Device& device, Kernels& kernels) {
  constexpr std::size_t kBytes = std::size_t{1} << 29U;
  const Arena there = kernels.make_arena(kBytes, "bench.there");
  const Arena too = kernels.make_arena(kBytes, "bench.too");
  const CopyMemory here = device.make_copy_memory(kBytes, "bench.here");
  const CopyMemory also = device.make_copy_memory(kBytes, "bench.also");
  ZR_CHECK(here.refusal.empty() && also.refusal.empty(), ErrorCode::kResource,
           "memory was not pinned: " + here.refusal);
  std::memset(here.arena.data(), 1, kBytes);
  std::memset(also.arena.data(), 1, kBytes);
  const Stream down = device.make_stream("down");
  const Stream up = device.make_stream("up");
  const auto speed = [](double bytes, const std::function<void()>& call) { return bytes / median(times(9, call)); };
  constexpr int kInARow = 4;
  const double bytes = kInARow * static_cast<double>(kBytes);
  const auto copies = [&](bool goes_down, bool goes_up) {
    for (int copy = 0; copy < kInARow; ++copy) {
      if (goes_down) kernels.copy_over_bus(here.arena.data(), there.data(), kBytes, down);
      if (goes_up) kernels.copy_over_bus(too.data(), also.arena.data(), kBytes, up);
    }
    down.synchronize();
    up.synchronize();
  };
  return {.inside = speed(2 * bytes,
                          [&] {
                            for (int copy = 0; copy < kInARow; ++copy)
                              kernels.copy(too.data(), there.data(), kBytes, down);
                            down.synchronize();
                          }),
          .down = speed(bytes, [&] { copies(true, false); }),
          .up = speed(bytes, [&] { copies(false, true); }),
          .both = speed(2 * bytes, [&] { copies(true, true); })};
}

/// Where states rest. The device is the GPU, or the CPU.
struct Places {
  Residency optimizer = Residency::kDevice;
  Residency gradient = Residency::kDevice;
  bool rounds_sums = false;
};

/// Milliseconds of steps.
std::vector<double> time_steps(const Options& options, DType dtype, std::unique_ptr<Device> device,
                               const Places& places = {}) {
  EngineSettings settings;
  settings.plan = zero_plan(0, {"dp"});
  settings.plan.residency.optimizer = places.optimizer;
  settings.plan.residency.gradient = places.gradient;
  settings.plan.residency.block_elements = options.block;
  settings.update.rounds_sums = places.rounds_sums;
  settings.threads = options.threads;
  settings.storage.folders = {options.folder};
  FlatTraining training(options.params, options.units, dtype, std::move(device), std::move(settings));
  (void)training.time_step();
  (void)training.time_step();  // of states in files the first reads nothing
  std::vector<double> all;
  for (int round = 0; round < options.rounds; ++round) all.push_back(training.time_step());
  return all;
}

void add(Record& record, const std::string& name, const std::string& unit, const std::vector<double>& samples,
         Better better = Better::kLower) {
  record.add({name, unit, summarise(samples), better, {}});
  std::printf("%-64s %10.3f %s\n", name.c_str(), median(samples), unit.c_str());
  std::fflush(stdout);
}

/// A step beside what it may take at least.
void add_step(Record& record, const std::string& name, const std::vector<double>& steps, double floor) {
  std::vector<double> over;
  for (const double step : steps) over.push_back(step / floor);
  add(record, name, "ms", steps);
  add(record, name + ", over its floor", "ratio", over);
}

void measure_steps(const Options& options, const Speeds& speed, Record& record) {
  const auto n = static_cast<double>(options.params);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const std::string of = "step, " + std::string(name_of(dtype));
    add_step(record, of + ", states on the device", time_steps(options, dtype, make_cuda_device(0)),
             28 * n / speed.inside);
    const std::vector<double> host = time_steps(options, dtype, make_cpu_device());
    add(record, of + ", all on the host", "ms", host);
    for (const bool rounds : {false, true}) {
      if (rounds && dtype == DType::kFloat32) continue;
      const double param = static_cast<double>(size_of(dtype));
      const double crossing = std::max((param + (rounds ? 2.0 : 4.0)) * n / speed.down, param * n / speed.up);
      const std::string sums = rounds ? ", sums of 16 bits" : "";
      add_step(record, of + ", states in host memory" + sums,
               time_steps(options, dtype, make_cuda_device(0), {.optimizer = Residency::kHost, .rounds_sums = rounds}),
               std::max(crossing, median(host)));
      if (!rounds)
        add_step(record, of + ", states and gradients in host memory",
                 time_steps(options, dtype, make_cuda_device(0),
                            {.optimizer = Residency::kHost, .gradient = Residency::kHost}),
                 std::max(param * n / speed.up, median(host)));
      if (options.folder.empty()) continue;
      add(record, of + ", states in files" + sums, "ms",
          time_steps(options, dtype, make_cuda_device(0), {.optimizer = Residency::kFiles, .rounds_sums = rounds}));
    }
  }
}

void measure_rows(Device& device, Kernels& kernels, const Speeds& speed, Record& record) {
  constexpr std::int64_t kRows = std::int64_t{1} << 20;
  constexpr std::int64_t kTaken = std::int64_t{1} << 18;
  for (const std::int64_t dim : {64, 256, 1024}) {
    const CopyMemory table = device.make_copy_memory(array_bytes(kRows * dim, DType::kFloat32), "bench.table");
    std::memset(table.arena.data(), 1, table.arena.capacity());
    const Arena out = kernels.make_arena(array_bytes(kTaken * dim, DType::kFloat32), "bench.out");
    const Arena indices = kernels.make_arena(kTaken * sizeof(std::int64_t), "bench.indices");
    std::vector<std::int64_t> chosen(kTaken);
    std::uint64_t state = 1;
    for (std::int64_t& index : chosen) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      index = static_cast<std::int64_t>(state >> 40U) % kRows;
    }
    const Stream stream = device.make_stream("bench.rows");
    kernels.copy(indices.data(), chosen.data(), chosen.size() * sizeof(std::int64_t), stream);
    const std::vector<double> all = times(9, [&] {
      gather_rows_on_device({.table = reinterpret_cast<const float*>(table.arena.data()),
                             .rows = kRows,
                             .dim = dim,
                             .indices = reinterpret_cast<const std::int64_t*>(indices.data()),
                             .out = reinterpret_cast<float*>(out.data()),
                             .n = kTaken},
                            stream.native());
      stream.synchronize();
    });
    add_step(record, std::to_string(kTaken) + " rows of " + std::to_string(dim) + " from host memory", all,
             static_cast<double>(array_bytes(kTaken * dim, DType::kFloat32)) / speed.up);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"The step phase with states beside a GPU against its bus"};
  app.add_option("--params", options.params, "elements")
      ->check(CLI::Range(std::int64_t{1} << 20, std::int64_t{1} << 34));
  app.add_option("--units", options.units, "units of equal size")->check(CLI::Range(1, 1000));
  app.add_option("--rounds", options.rounds, "steps of each")->check(CLI::Range(1, 1000));
  app.add_option("--threads", options.threads, "of the host")->check(CLI::Range(1, 1024));
  app.add_option("--block", options.block, "elements that cross the bus together, a multiple of 1024");
  app.add_option("--folder", options.folder, "also with states in files of this folder");
  app.add_option("--json", options.json, "file for the result");
  CLI11_PARSE(app, argc, argv);
  Record record("offload/bus", argc, argv);
  record.setting("params", options.params);
  record.setting("units", options.units);
  record.setting("threads", options.threads);
  record.setting("block", options.block);
  record.note("one rank, ZeRO-0, AdamW, no clipping; the step alone, after a backward");
  const std::unique_ptr<Device> device = make_cuda_device(0);
  ThreadPool pool(1);
  const std::unique_ptr<Kernels> kernels = make_kernels(*device, pool);
  const Speeds speed = speeds_of(*device, *kernels);
  constexpr double kGigabytes = 1e6;  // bytes a millisecond
  for (const auto& [name, value] : {std::pair{"copy inside of the device, read and written", speed.inside},
                                    {"pinned copy down", speed.down},
                                    {"pinned copy up", speed.up},
                                    {"pinned copies both ways at once, together", speed.both}}) {
    add(record, name, "GB/s", {value / kGigabytes}, Better::kNone);
  }
  measure_rows(*device, *kernels, speed, record);
  measure_steps(options, speed, record);
  record.write(options.json);
  return 0;
}
