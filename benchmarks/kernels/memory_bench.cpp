// Copies and bucket stores on the pages that the runtime uses, cached against streaming stores: where
// kCopyStreamBytes and kStreamBytes come from. Each size is copied round and round through arenas of 256 MiB,
// so that source and destination are not in the caches. Run: memory_bench [--seconds S] [--json FILE]
#include "kernels/bench_support.h"
#include "support/record.h"

#include <kernels/bucket/bucket.h>
#include <kernels/copy/copy.h>

#include <CLI/CLI.hpp>

#include <cstdio>
#include <cstring>

namespace {

using namespace zeroth;              // NOLINT(google-build-using-namespace)
using namespace zeroth::benchmarks;  // NOLINT(google-build-using-namespace)

constexpr std::int64_t kArenaBytes = std::int64_t{256} << 20;

using CopyFunction = std::function<void(std::byte*, const std::byte*, std::int64_t)>;

/// Alternates the functions over the whole arenas in pieces of `bytes`; one row a function: GB/s of payload.
void compare(const std::vector<std::pair<std::string, CopyFunction>>& functions, Arena& to, Arena& from,
             std::int64_t bytes, double seconds, const std::string& suffix, Record& record) {
  std::vector<std::vector<double>> rates(functions.size());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::size_t which = 0;
  std::int64_t at = 0;
  while (std::chrono::steady_clock::now() < deadline || rates.back().size() < 3) {
    const auto start = std::chrono::steady_clock::now();
    functions[which].second(to.as<std::byte>() + at, from.as<std::byte>() + at, bytes);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    rates[which].push_back(static_cast<double>(bytes) * 1e-9 / elapsed.count());
    which = (which + 1) % functions.size();
    at = at + 2 * bytes <= kArenaBytes ? at + bytes : 0;
  }
  for (std::size_t k = 0; k < functions.size(); ++k) {
    record.add({functions[k].first + suffix, "GB/s", summarise(rates[k]), Better::kHigher, {}});
  }
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 0.3;
  std::string json;
  CLI::App app{"cached and streaming copies"};
  app.add_option("--seconds", seconds, "time for each row")->check(CLI::PositiveNumber);
  app.add_option("--json", json, "file for the result");
  CLI11_PARSE(app, argc, argv);

  const kernels::Isa isa = kernels::best_isa();
  const std::vector<std::pair<std::string, CopyFunction>> functions{
      {"memcpy", [](std::byte* to, const std::byte* from,
                    std::int64_t bytes) { std::memcpy(to, from, static_cast<std::size_t>(bytes)); }},
      {"copy_stream",
       [isa](std::byte* to, const std::byte* from, std::int64_t bytes) { kernels::copy_stream(to, from, bytes, isa); }},
      {"bucket_store", [isa](std::byte* to, const std::byte* from, std::int64_t bytes) {
         (void)kernels::bucket_store(to, DType::kFloat32, from, DType::kFloat32, bytes / 4, isa);
       }}};
  Record record("kernels/memory", argc, argv);
  record.setting("isa", kernels::describe_isa());
  record.note("GB/s of payload; source and destination are not in the caches");
  for (const auto& [from_pages, to_pages] :
       {std::pair{Pages::kShared, Pages::kHuge}, std::pair{Pages::kHuge, Pages::kShared},
        std::pair{Pages::kShared, Pages::kShared}}) {
    Arena from(kArenaBytes, from_pages);
    Arena to(kArenaBytes, to_pages);
    std::memset(from.as<std::byte>(), 1, kArenaBytes);
    std::memset(to.as<std::byte>(), 1, kArenaBytes);
    for (std::int64_t bytes = std::int64_t{32} << 10; bytes <= std::int64_t{64} << 20; bytes *= 2) {
      const std::string suffix = ", " + std::to_string(bytes >> 10) + " KiB, " + std::string(name_of(from_pages)) +
                                 " -> " + std::string(name_of(to_pages));
      compare(functions, to, from, bytes, seconds, suffix, record);
    }
  }
  std::printf("%s", record.table().c_str());
  record.write(json);
  return 0;
}
