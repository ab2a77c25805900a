// AdamW against a kernel that moves the same bytes and does nothing else: read 16 B and write 12 B an
// element, in place, on private huge pages, in the same process, in paired blocks. The quotient says what the
// arithmetic costs beyond the memory. Of bfloat16 parameters, masters in two halves, the bytes are the same.
//
// Two measures: whole passes (what a step sees, other load of the machine included), and pieces of 2^20
// elements, of each of which the fastest of all passes counts (what the machine gives when nobody else uses
// it).
//
// Run: adamw_bench [--params N] [--rounds N] [--threads T ...] [--isa scalar|avx2|avx512] [--json FILE]
#include "kernels/bench_support.h"
#include "kernels/stream.h"
#include "support/record.h"

#include <kernels/adamw/adamw.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <map>

namespace {

using namespace zeroth;              // NOLINT(google-build-using-namespace)
using namespace zeroth::benchmarks;  // NOLINT(google-build-using-namespace)
using kernels::Isa;

constexpr std::int64_t kPiece = std::int64_t{1} << 20;

using RangeFunction = std::function<void(std::int64_t, std::int64_t)>;

/// Milliseconds of one pass over [0, n), split evenly over the team at multiples of 1,024 elements.
double time_pass(Team& team, std::int64_t n, const RangeFunction& kernel) {
  const std::int64_t share = n / team.size() / 1024 * 1024;
  return team.time([&](int rank) {
    const std::int64_t begin = rank * share;
    kernel(begin, rank + 1 == team.size() ? n : begin + share);
  });
}

/// Milliseconds of a pass if every piece took its fastest time.
double quiet_pass(std::int64_t n, int passes, const RangeFunction& kernel) {
  double total = 0;
  for (std::int64_t begin = 0; begin + kPiece <= n; begin += kPiece) {
    double best = 1e9;
    for (int pass = 0; pass < passes; ++pass) {
      const auto start = std::chrono::steady_clock::now();
      kernel(begin, begin + kPiece);
      const auto stop = std::chrono::steady_clock::now();
      best = std::min(best, std::chrono::duration<double, std::milli>(stop - start).count());
      // The piece leaves the caches before the next pass: another one, far away, comes between.
      const std::int64_t other = (begin + n / 2) % (n - 2 * kPiece);
      kernel(other, other + 2 * kPiece);
    }
    total += best;
  }
  return total * static_cast<double>(n) / static_cast<double>(n / kPiece * kPiece);
}

struct Options {
  std::int64_t params = 50'000'000;
  int rounds = 15;
  int passes = 12;
  std::vector<int> threads{1, 2};
  std::string isa{kernels::name_of(kernels::best_isa())};
  std::string json;
};

Summary exact(double value) {
  return {value, value, value, 1};
}

double fastest(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}

void measure(const Options& options, Isa isa, Record& record) {
  const std::int64_t n = options.params;
  const std::size_t bytes = (static_cast<std::size_t>(n) * sizeof(float) + 4095) / 4096 * 4096;
  Arena states(4 * bytes, Pages::kHuge);
  Arena high_bits(bytes / 2, Pages::kShared);
  Arena low_bits(bytes / 2, Pages::kHuge);
  const volatile float hidden_zero = 0.0F;
  const StreamArrays a{states.as<float>(), states.as<float>(bytes), states.as<float>(2 * bytes),
                       states.as<float>(3 * bytes), hidden_zero};
  auto* const high = high_bits.as<BFloat16>();
  auto* const low = low_bits.as<std::int16_t>();
  for (std::int64_t i = 0; i < n; ++i) {
    a.param[i] = 0.01F * static_cast<float>(i % 97);
    a.grad[i] = 1e-3F * static_cast<float>(i % 31 - 15);
    a.exp_avg[i] = 1e-3F;
    a.exp_avg_sq[i] = 1e-4F;
    high[i] = BFloat16(a.param[i]);
    low[i] = 0;
  }
  const auto coefficients = kernels::adamw_coefficients({.lr = 1e-5, .weight_decay = 0.1, .step = 10});
  const auto adamw = [=](bool halves) -> RangeFunction {
    return [=](std::int64_t begin, std::int64_t end) {
      kernels::adamw_step({.param = halves ? static_cast<void*>(high + begin) : a.param + begin,
                           .low = halves ? low + begin : nullptr,
                           .exp_avg = a.exp_avg + begin,
                           .exp_avg_sq = a.exp_avg_sq + begin,
                           .grad = a.grad + begin,
                           .n = end - begin,
                           .coefficients = coefficients},
                          isa);
    };
  };
  const auto stream = stream_kernel(isa);
  const std::vector<RangeFunction> kernels{adamw(false), adamw(true),
                                           [=](std::int64_t begin, std::int64_t end) { stream(a, begin, end); }};
  const std::string names[] = {"adamw", "adamw, masters in two halves"};
  constexpr double kBar = 1.05;

  for (const int num_threads : options.threads) {
    Team team(num_threads);
    const std::string suffix = ", " + std::to_string(num_threads) + (num_threads == 1 ? " thread" : " threads");
    for (std::size_t which = 0; which < 2; ++which) {
      const Paired paired = run_paired(
          options.rounds, [&] { return time_pass(team, n, kernels[which]); },
          [&] { return time_pass(team, n, kernels[2]); });
      const std::string name = names[which] + suffix;
      record.add({name, "ms", summarise(paired.a), Better::kLower, {}});
      record.add({"fastest " + name, "ms", exact(fastest(paired.a)), Better::kLower, {}});
      if (which == 0) {
        record.add({"stream" + suffix, "ms", summarise(paired.b), Better::kNone, {}});
        record.add({"fastest stream" + suffix, "ms", exact(fastest(paired.b)), Better::kNone, {}});
      }
      record.add({name + " / stream", "ratio", summarise(paired.ratio), Better::kLower, kBar});
    }
  }
  const double roof = quiet_pass(n, options.passes, kernels[2]);
  record.add({"quiet stream, 1 thread", "ms", exact(roof), Better::kNone, {}});
  for (std::size_t which = 0; which < 2; ++which) {
    const double ms = quiet_pass(n, options.passes, kernels[which]);
    const std::string name = "quiet " + names[which] + ", 1 thread";
    record.add({name, "ms", exact(ms), Better::kLower, {}});
    record.add({name + " / stream", "ratio", exact(ms / roof), Better::kLower, kBar});
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"AdamW against a streaming kernel of the same traffic"};
  app.add_option("--params", options.params, "elements")
      ->check(CLI::Range(std::int64_t{1} << 23, std::int64_t{1} << 34));
  app.add_option("--rounds", options.rounds, "A B B A blocks")->check(CLI::Range(1, 1000));
  app.add_option("--passes", options.passes, "passes of the quiet measure")->check(CLI::Range(1, 1000));
  app.add_option("--threads", options.threads, "numbers of threads");
  app.add_option("--isa", options.isa, "scalar, avx2 or avx512");
  app.add_option("--json", options.json, "file for the result");
  CLI11_PARSE(app, argc, argv);
  const std::map<std::string, Isa> isas{{"scalar", Isa::kScalar}, {"avx2", Isa::kAvx2}, {"avx512", Isa::kAvx512}};
  const auto isa = isas.find(options.isa);
  if (isa == isas.end() || !kernels::is_supported(isa->second)) {
    std::fprintf(stderr, "this processor runs %s\n", kernels::describe_isa().c_str());
    return 64;
  }
  Record record("kernels/adamw", argc, argv);
  record.setting("params", options.params);
  record.setting("isa", options.isa);
  record.note(
      "stream: reads 16 B and writes 12 B an element in place, in the same process and memory; blocks A B B "
      "A");
  record.note("quiet: every piece of 2^20 elements counts with its fastest pass");
  measure(options, isa->second, record);
  std::printf("%s", record.table().c_str());
  record.write(options.json);
  return 0;
}
