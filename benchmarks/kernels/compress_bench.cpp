// Packing, unpacking and sums of compressed numbers on one core, as a ratio to a copy:
//
//   (bytes that the kernel has to read + bytes that it has to write) / second
//   -------------------------------------------------------------------------
//         (bytes read + bytes written) / second, of kernels::copy_stream()
//
// A byte counts once, however often a kernel passes over it. Sources and results of a call are counted, tables of
// places (the greatest) and factors (low rank) are not. Each ratio is of two calls of the same round, one after the
// other. There are two sets of rows:
//
// - beyond the caches: arenas of 128 MiB, a call has 2^20 elements, and in a round each kernel has a piece of its own;
// - ", in L2": a call has 2^14 elements, of which all arrays together are in the L2 cache, and is repeated.
//
// Run: compress_bench [--seconds S] [--only TEXT] [--json FILE]
#include "kernels/bench_support.h"
#include "support/record.h"

#include <kernels/copy/copy.h>
#include <kernels/lowrank/lowrank.h>
#include <kernels/quant/quant.h>
#include <kernels/signs/signs.h>
#include <kernels/topk/topk.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

namespace {

using namespace zeroth;              // NOLINT(google-build-using-namespace)
using namespace zeroth::benchmarks;  // NOLINT(google-build-using-namespace)

constexpr std::int64_t kElements = std::int64_t{32} << 20;  // of an arena of floats
constexpr std::int64_t kPiece = std::int64_t{1} << 20;      // elements of a call
constexpr std::int64_t kSmall = std::int64_t{1} << 14;      // of a call in the L2 cache
constexpr int kRepeats = 8;                                 // of such calls
constexpr std::int64_t kPieces = kElements / kPiece;
constexpr std::int64_t kBetween = 5;  // pieces from one kernel's to the next one's
constexpr std::int64_t kSources = 4;
constexpr std::int64_t kPart = 100;   // one of so many is taken of the greatest
constexpr std::int64_t kSide = 1024;  // columns of a piece as a matrix
constexpr int kRank = 4;

struct Op {
  std::string name;
  double bytes = 0;  ///< read and written, of an element
  std::function<void(std::int64_t at)> run;
};

}  // namespace

int main(int argc, char** argv) {
  double seconds = 0.5;
  std::string json;
  std::string only;
  CLI::App app{"kernels of compression"};
  app.add_option("--seconds", seconds, "time for each row")->check(CLI::PositiveNumber);
  app.add_option("--only", only, "rows whose name has this text, beside the copy");
  app.add_option("--json", json, "file for the result");
  CLI11_PARSE(app, argc, argv);

  const kernels::Isa isa = kernels::best_isa();
  constexpr std::size_t kBytes = std::size_t{kElements} * sizeof(float);
  std::array<std::unique_ptr<Arena>, 8> arenas;
  std::uint64_t state = 1;  // numbers as gradients have them: sums of eight uniform ones, from -1 to 1
  for (auto& arena : arenas) {
    arena = std::make_unique<Arena>(kBytes, Pages::kHuge);
    auto* const values = arena->as<float>();
    for (std::int64_t i = 0; i < kElements; ++i) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      const std::uint64_t bytes = (state ^ state >> 29U) * 0x9e3779b97f4a7c15U;
      float sum = 0.0F;
      for (unsigned k = 0; k < 8; ++k) sum += static_cast<float>(bytes >> 8 * k & 0xffU);
      values[i] = sum * 0x1p-10F - 0x1.fep-1F + static_cast<float>(bytes >> 40U) * 0x1p-34F;
    }
  }
  std::int64_t piece = kPiece;
  // What one kernel writes another one does not read as other numbers: a NaN would spread to all, and blocks with one
  // have no codes.
  const auto* const momentum = arenas[0]->as<float>();
  const auto* const grad = arenas[1]->as<float>();
  auto* const codes = arenas[2]->as<std::uint8_t>();  // four sources of 8 bits fill it
  auto* const message = arenas[3]->as<float>();
  auto* const error = arenas[4]->as<float>();
  auto* const left = arenas[5]->as<float>();  // of the greatest alone
  auto* const sums = arenas[6]->as<float>();
  auto* const made = arenas[7]->as<std::uint8_t>();
  for (std::size_t i = 0; i < kBytes; ++i) codes[i] ^= (codes[i] & 0x7fU) == 0x7fU ? 1U : 0U;  // no NaN of 8 bits
  constexpr std::int64_t kBlock = 256;
  const std::vector<float> scales(static_cast<std::size_t>(kElements / kBlock), 0.01F);
  std::vector<float> made_scales(static_cast<std::size_t>(kElements / kBlock));
  const auto signs_of = [&](std::int64_t at) {
    std::array<kernels::SignSource, kSources> sources;
    for (std::int64_t k = 0; k < kSources; ++k)
      sources[static_cast<std::size_t>(k)] = {codes + (k * kElements + at) / 8, 0.1};
    return sources;
  };
  const auto codes_of = [&](std::int64_t at, kernels::CodeFormat format) {
    std::array<kernels::QuantSource, kSources> sources;
    for (std::int64_t k = 0; k < kSources; ++k) {
      sources[static_cast<std::size_t>(k)] = {codes + k * kElements + kernels::code_bytes(at, format),
                                              scales.data() + at / kBlock};
    }
    return sources;
  };
  const auto quantize = [&](std::int64_t at, kernels::CodeFormat format, bool with_error, bool stochastic = false) {
    kernels::quantize({.codes = made + kernels::code_bytes(at, format),
                       .scales = made_scales.data() + at / kBlock,
                       .src = grad + at,
                       .error = with_error ? error + at : nullptr,
                       .n = piece,
                       .block = kBlock,
                       .format = format,
                       .stochastic = {.enabled = stochastic, .seed = 7}},
                      isa);
  };
  const auto dequantize = [&](std::int64_t at, kernels::CodeFormat format, int num) {
    const auto sources = codes_of(at, format);
    kernels::dequantize({.dst = sums + at,
                         .sources = sources.data(),
                         .num_sources = num,
                         .n = piece,
                         .block = kBlock,
                         .format = format},
                        isa);
  };
  const auto requantize = [&](std::int64_t at, kernels::CodeFormat format) {
    const auto sources = codes_of(at, format);
    kernels::requantize({.sum = {.sources = sources.data(),
                                 .num_sources = kSources,
                                 .n = piece,
                                 .block = kBlock,
                                 .format = format,
                                 .factor = 0.25F},
                         .quantize = {.codes = made + kernels::code_bytes(at, format),
                                      .scales = made_scales.data() + at / kBlock,
                                      .n = piece,
                                      .block = kBlock,
                                      .format = format}},
                        isa);
  };
  std::vector<std::int32_t> places(static_cast<std::size_t>(kernels::topk_room(kPiece, kPiece / kPart)));
  std::vector<float> values(places.size());
  const auto take = [&](std::int64_t at, bool with_error) {
    kernels::topk({.places = places.data(),
                   .values = values.data(),
                   .src = grad + at,
                   .error = with_error ? left + at : nullptr,
                   .n = piece,
                   .k = piece / kPart,
                   .room = kernels::topk_room(piece, piece / kPart)},
                  isa);
  };
  std::vector<float> thin_p(static_cast<std::size_t>(kSide * kRank), 0.01F);
  std::vector<float> thin_q(static_cast<std::size_t>(kSide * kRank), 0.01F);
  const auto shape = [&] { return kernels::LowRankShape{piece / kSide, kSide, kSide, kRank}; };
  const auto product_of = [&](std::int64_t at, const std::vector<float>& factor, std::vector<float>& result) {
    return kernels::LowRankProductArgs{.shape = shape(),
                                       .matrix = grad + at,
                                       .factor = factor.data(),
                                       .factor_stride = kSide,
                                       .result = result.data(),
                                       .result_stride = kSide};
  };
  using kernels::CodeFormat;
  const std::vector<Op> ops{
      {"copy", 8,
       [&](std::int64_t at) {
         kernels::copy_stream(reinterpret_cast<std::byte*>(sums + at), reinterpret_cast<const std::byte*>(grad + at),
                              piece * 4, isa);
       }},
      {"sign_message", 16,
       [&](std::int64_t at) {
         kernels::sign_message({.error = message + at,
                                .momentum = momentum + at,
                                .grad = grad + at,
                                .n = piece,
                                .momentum_factor = 0.9,
                                .grad_factor = 0.1},
                               isa);
       }},
      {"sign_pack", 8.125,
       [&](std::int64_t at) {
         kernels::sign_pack({.error = message + at, .bits = made + at / 8, .n = piece, .scale = 0.1}, isa);
       }},
      {"sign_sum of 4", 4.5,
       [&](std::int64_t at) {
         const auto sources = signs_of(at);
         kernels::sign_sum(
             {.dst = sums + at, .sources = sources.data(), .num_sources = kSources, .n = piece, .factor = 0.25}, isa);
       }},
      {"quantize to int8", 5, [&](std::int64_t at) { quantize(at, CodeFormat::kInt8, false); }},
      {"quantize to int8 with error", 13, [&](std::int64_t at) { quantize(at, CodeFormat::kInt8, true); }},
      {"quantize to int8, stochastic", 5, [&](std::int64_t at) { quantize(at, CodeFormat::kInt8, false, true); }},
      {"quantize to int4", 4.5, [&](std::int64_t at) { quantize(at, CodeFormat::kInt4, false); }},
      {"quantize to int4 with error", 12.5, [&](std::int64_t at) { quantize(at, CodeFormat::kInt4, true); }},
      {"quantize to fp8", 5, [&](std::int64_t at) { quantize(at, CodeFormat::kE4M3, false); }},
      {"quantize to fp8 with error", 13, [&](std::int64_t at) { quantize(at, CodeFormat::kE4M3, true); }},
      {"quantize to fp4", 4.5, [&](std::int64_t at) { quantize(at, CodeFormat::kE3M0, false); }},
      {"dequantize int8", 5, [&](std::int64_t at) { dequantize(at, CodeFormat::kInt8, 1); }},
      {"dequantize int4", 4.5, [&](std::int64_t at) { dequantize(at, CodeFormat::kInt4, 1); }},
      {"dequantize fp8", 5, [&](std::int64_t at) { dequantize(at, CodeFormat::kE4M3, 1); }},
      {"dequantize fp4", 4.5, [&](std::int64_t at) { dequantize(at, CodeFormat::kE3M0, 1); }},
      {"sum of 4 of int8", 8, [&](std::int64_t at) { dequantize(at, CodeFormat::kInt8, kSources); }},
      {"sum of 4 of int4", 6, [&](std::int64_t at) { dequantize(at, CodeFormat::kInt4, kSources); }},
      {"sum of 4 of fp8", 8, [&](std::int64_t at) { dequantize(at, CodeFormat::kE4M3, kSources); }},
      {"sum of 4 of fp4", 6, [&](std::int64_t at) { dequantize(at, CodeFormat::kE3M0, kSources); }},
      {"sum of 4 of int8, quantized", 5, [&](std::int64_t at) { requantize(at, CodeFormat::kInt8); }},
      {"sum of 4 of int4, quantized", 2.5, [&](std::int64_t at) { requantize(at, CodeFormat::kInt4); }},
      {"sum of 4 of fp8, quantized", 5, [&](std::int64_t at) { requantize(at, CodeFormat::kE4M3); }},
      {"sum of 4 of fp4, quantized", 2.5, [&](std::int64_t at) { requantize(at, CodeFormat::kE3M0); }},
      {"greatest 1 %", 4, [&](std::int64_t at) { take(at, false); }},
      {"greatest 1 % with error", 12, [&](std::int64_t at) { take(at, true); }},
      {"product of rank 4", 4, [&](std::int64_t at) { kernels::lowrank_product(product_of(at, thin_q, thin_p), isa); }},
      {"transposed product of rank 4", 4,
       [&](std::int64_t at) { kernels::lowrank_transposed_product(product_of(at, thin_p, thin_q), isa); }},
      {"error of rank 4", 8,
       [&](std::int64_t at) {
         kernels::lowrank_restore({.shape = shape(),
                                   .p = thin_p.data(),
                                   .p_stride = kSide,
                                   .q = thin_q.data(),
                                   .q_stride = kSide,
                                   .error = message + at},
                                  isa);
       }},
  };
  Record record("kernels/compress", argc, argv);
  record.setting("isa", kernels::describe_isa());
  record.note(
      "one core; bytes that have to be read and written a second, each counted once, as a ratio to the same of a "
      "copy in the same round");
  record.note("in L2: 2^14 elements, again and again; else beyond the caches: 2^20 elements of 2^25, others each time");
  record.note("fastest: of all rounds, as a ratio to the copy's: what is left where others use the machine as well");
  struct Region {
    std::string suffix;
    std::int64_t elements;
    std::int64_t pieces;
    int repeats;
  };
  for (const Region& region : {Region{"", kPiece, kPieces, 1}, Region{", in L2", kSmall, 1, kRepeats}}) {
    piece = region.elements;
    std::vector<std::size_t> chosen;
    for (std::size_t op = 0; op < ops.size(); ++op) {
      if (op == 0 || ops[op].name.find(only) != std::string::npos) chosen.push_back(op);
    }
    std::vector<std::vector<double>> rates(ops.size());
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds * static_cast<double>(chosen.size()));
    std::int64_t round = 0;
    while (std::chrono::steady_clock::now() < deadline || rates[chosen.back()].size() < 3) {
      for (const std::size_t op : chosen) {
        const std::int64_t at = (round + static_cast<std::int64_t>(op) * kBetween) % region.pieces * piece;
        if (region.repeats > 1) ops[op].run(at);
        const auto start = std::chrono::steady_clock::now();
        for (int k = 0; k < region.repeats; ++k) ops[op].run(at);
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        rates[op].push_back(ops[op].bytes * static_cast<double>(piece * region.repeats) * 1e-9 / elapsed.count());
      }
      ++round;
    }
    for (const std::size_t op : chosen) {
      const std::string name = ops[op].name + region.suffix;
      record.add({name, "GB/s", summarise(rates[op]), Better::kHigher, {}});
      std::vector<double> ratio;
      for (std::size_t k = 0; k < rates[op].size(); ++k) ratio.push_back(rates[op][k] / rates[0][k]);
      const auto fastest = [&](std::size_t of) { return *std::max_element(rates[of].begin(), rates[of].end()); };
      if (op == 0) continue;
      record.add({name + " / copy", "ratio", summarise(ratio), Better::kHigher, {}});
      record.add({"fastest " + name + " / copy", "ratio", summarise({fastest(op) / fastest(0)}), Better::kHigher, {}});
    }
  }
  std::printf("%s", record.table().c_str());
  record.write(json);
  return 0;
}
