// What a failpoint costs where nothing is asked of it, beside the same loop without one.
//
//   failpoint_bench --benchmark_repetitions=9 --benchmark_report_aggregates_only=true
#include <zeroth/base/failpoint.h>

#include <benchmark/benchmark.h>

#include <atomic>
#include <cstdint>
#include <string_view>

namespace zeroth {
namespace {

// A site that is in no room has no row: the macro's own steps, with the row of another one.
#define ZR_BENCHMARK_SITE()                                                      \
  do {                                                                           \
    if (detail::failpoints_armed.load(std::memory_order_relaxed)) [[unlikely]] { \
      detail::pass_failpoint(0, std::string_view(), __LINE__);                   \
    }                                                                            \
  } while (false)

void without(benchmark::State& state) {
  std::uint64_t sum = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(++sum);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(without);

void one_site(benchmark::State& state) {
  std::uint64_t sum = 0;
  for (auto _ : state) {
    ZR_BENCHMARK_SITE();
    benchmark::DoNotOptimize(++sum);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(one_site);

void ten_sites(benchmark::State& state) {
  std::uint64_t sum = 0;
  for (auto _ : state) {
    for (int site = 0; site < 10; ++site) {
      ZR_BENCHMARK_SITE();
      benchmark::ClobberMemory();
    }
    benchmark::DoNotOptimize(++sum);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(ten_sites);

/// Armed for another site: what a test run pays.
void armed_elsewhere(benchmark::State& state) {
  arm_failpoints(parse_failpoints("export.folder:kill"), 0);
  for (auto _ : state) ZR_BENCHMARK_SITE();
  disarm_failpoints();
}
BENCHMARK(armed_elsewhere);

}  // namespace
}  // namespace zeroth
