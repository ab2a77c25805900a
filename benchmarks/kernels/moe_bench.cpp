// Router, dispatch and permutation of a mixture of experts on one core, beside a copy of as many bytes.
//
// Rows are of 4 tokens' experts each (k = 4), of arrays beyond the caches. A rate counts the bytes that have to be read
// and written, each once: of permute and unpermute one row for each slot on both sides, of the router its logits;
// `read` is a sum of words in their order, the limit of what reads more than it writes. Each ratio is of two calls of
// the same round, one after the other.
//
// Run: moe_bench [--seconds S] [--width FLOATS] [--json FILE]
#include "kernels/bench_support.h"
#include "support/record.h"

#include <kernels/copy/copy.h>
#include <kernels/moe/dispatch.h>
#include <kernels/moe/gate.h>
#include <kernels/moe/permute.h>

#include <CLI/CLI.hpp>

#include <array>
#include <cstdio>

namespace {

using namespace zeroth;              // NOLINT(google-build-using-namespace)
using namespace zeroth::benchmarks;  // NOLINT(google-build-using-namespace)

constexpr std::int64_t kTokens = 8192;
constexpr std::int64_t kExperts = 256;
constexpr std::int64_t kChoices = 4;
constexpr std::int64_t kSlots = kTokens * kChoices;

struct Op {
  std::string name;
  double bytes = 0;  ///< read and written by a call
  std::function<void()> run;
};

/// Reads words in their order, four at a time.
std::uint64_t sum_of(const std::uint64_t* words, std::int64_t n) {
  std::array<std::uint64_t, 4> sums{};
  for (std::int64_t i = 0; i + 4 <= n; i += 4) {
    for (std::size_t k = 0; k < 4; ++k) sums[k] += words[i + static_cast<std::int64_t>(k)];
  }
  return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 1.0;
  std::string json;
  CLI::App app{"kernels of a mixture of experts"};
  app.add_option("--seconds", seconds, "time for each row")->check(CLI::PositiveNumber);
  std::int64_t width = 1024;
  app.add_option("--width", width, "floats of a row")->check(CLI::Range(1, 16384));
  app.add_option("--json", json, "file for the result");
  CLI11_PARSE(app, argc, argv);

  const kernels::Isa isa = kernels::best_isa();
  const std::size_t row_bytes = static_cast<std::size_t>(width) * sizeof(float);
  Arena tokens(kTokens * row_bytes, Pages::kHuge);
  Arena rows(kSlots * row_bytes, Pages::kHuge);
  Arena other(kSlots * row_bytes, Pages::kHuge);
  Arena logits(kTokens * kExperts * sizeof(float), Pages::kHuge);
  Arena d_logits(kTokens * kExperts * sizeof(float), Pages::kHuge);
  std::uint64_t state = 1;
  const auto fill = [&](float* values, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      values[i] = static_cast<float>(state >> 40U) * 0x1p-21F - 4.0F;
    }
  };
  fill(tokens.as<float>(), kTokens * width);
  fill(rows.as<float>(), kSlots * width);
  fill(other.as<float>(), kSlots * width);
  fill(logits.as<float>(), kTokens * kExperts);
  std::vector<std::int32_t> chosen(kSlots), slot_of(kSlots), source_of(kSlots);
  std::vector<float> weights(kSlots), d_weights(kSlots);
  std::vector<std::int64_t> counts(kExperts), offsets(kExperts + 1), of_experts(kExperts);
  std::vector<double> score_sums(kExperts);
  double z_sum = 0.0;
  const kernels::GateRule rule{.experts = kExperts, .k = kChoices, .renormalize = true};
  kernels::DispatchArgs dispatch{.chosen = chosen.data(),
                                 .tokens = kTokens,
                                 .k = kChoices,
                                 .experts = kExperts,
                                 .counts = counts.data(),
                                 .offsets = offsets.data(),
                                 .slot_of = slot_of.data(),
                                 .source_of = source_of.data()};
  kernels::DispatchArgs random = dispatch;
  random.capacity = kSlots / kExperts;
  random.policy = kernels::DropPolicy::kRandom;
  std::vector<std::int64_t> workspace(kernels::dispatch_workspace_bytes(random, kExperts) / sizeof(std::int64_t));
  dispatch.workspace = random.workspace = workspace.data();
  const kernels::UnpermuteArgs unpermute{.out = tokens.as<float>(),
                                         .in = rows.as<float>(),
                                         .width = width,
                                         .tokens = kTokens,
                                         .k = kChoices,
                                         .slots = kSlots,
                                         .slot_of = slot_of.data(),
                                         .weights = weights.data()};
  kernels::UnpermuteArgs of_weights = unpermute;
  of_weights.out = d_weights.data();
  of_weights.d_out = tokens.as<float>();
  const double rows_bytes = double{kSlots} * static_cast<double>(row_bytes);
  constexpr double kLogits = double{kTokens} * kExperts * sizeof(float);
  std::uint64_t total = 0;  // printed, so that it is computed
  const std::vector<Op> ops{
      {"copy", 2 * rows_bytes,
       [&] { kernels::copy_stream(other.as<std::byte>(), rows.as<std::byte>(), kSlots * row_bytes, isa); }},
      {"read", rows_bytes, [&] { total = total + sum_of(rows.as<std::uint64_t>(), kSlots * width / 2); }},
      {"gate", kLogits,
       [&] {
         kernels::gate({.rule = rule,
                        .logits = logits.as<float>(),
                        .tokens = kTokens,
                        .chosen = chosen.data(),
                        .weights = weights.data(),
                        .counts = of_experts.data(),
                        .score_sums = score_sums.data(),
                        .z_sum = &z_sum},
                       isa);
       }},
      {"gate backward", 2 * kLogits,
       [&] {
         kernels::gate_backward({.rule = rule,
                                 .logits = logits.as<float>(),
                                 .tokens = kTokens,
                                 .chosen = chosen.data(),
                                 .d_weights = d_weights.data(),
                                 .d_score_sums = score_sums.data(),
                                 .d_z_sum = 1e-3,
                                 .d_logits = d_logits.as<float>()},
                                isa);
       }},
      {"dispatch, random drops", 3.0 * kSlots * sizeof(std::int32_t), [&] { kernels::dispatch(random); }},
      {"dispatch", 3.0 * kSlots * sizeof(std::int32_t), [&] { kernels::dispatch(dispatch); }},
      {"permute", 2 * rows_bytes,
       [&] {
         kernels::permute({.out = other.as<float>(),
                           .in = tokens.as<float>(),
                           .width = width,
                           .tokens = kTokens,
                           .k = kChoices,
                           .slots = kSlots,
                           .source_of = source_of.data()},
                          isa);
       }},
      {"permute, with weights", 2 * rows_bytes,
       [&] {
         kernels::permute({.out = other.as<float>(),
                           .in = tokens.as<float>(),
                           .width = width,
                           .tokens = kTokens,
                           .k = kChoices,
                           .slots = kSlots,
                           .source_of = source_of.data(),
                           .weights = weights.data()},
                          isa);
       }},
      {"unpermute", rows_bytes * 1.25, [&] { kernels::unpermute(unpermute, isa); }},
      {"gradient of weights", rows_bytes * 1.25, [&] { kernels::unpermute_weights(of_weights, isa); }},
  };
  Record record("kernels/moe", argc, argv);
  record.setting("isa", kernels::describe_isa());
  record.note("one core; 8192 tokens, 256 experts, k = 4, rows of " + std::to_string(width) + " floats");
  std::vector<std::vector<double>> times(ops.size());
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds * static_cast<double>(ops.size()));
  while (std::chrono::steady_clock::now() < deadline || times.back().size() < 4) {
    for (std::size_t op = 0; op < ops.size(); ++op) {
      const auto start = std::chrono::steady_clock::now();
      ops[op].run();
      const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
      times[op].push_back(elapsed.count());
    }
  }
  for (std::size_t op = 0; op < ops.size(); ++op) {
    auto& of_op = times[op];
    record.add({ops[op].name, "ms", summarise({of_op.begin() + 1, of_op.end()}), Better::kLower, {}});
    std::vector<double> ratio;
    for (std::size_t k = 1; k < of_op.size(); ++k)
      ratio.push_back(ops[op].bytes / of_op[k] / (ops[0].bytes / times[0][k]));
    if (op > 0) record.add({ops[op].name + " / copy", "ratio", summarise(ratio), Better::kHigher, {}});
  }
  std::printf("%s(a sum of words: %llx)\n", record.table().c_str(), static_cast<unsigned long long>(total));
  record.write(json);
  return 0;
}
