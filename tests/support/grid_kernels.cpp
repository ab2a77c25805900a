#include "support/grid_kernels.h"

#include "support/grid_threads.h"

#include <kernels/adamw/adamw_grid.h>
#include <kernels/bucket/bucket_grid.h>
#include <kernels/reduce/reduce_grid.h>
#include <kernels/rows/rows_grid.h>
#include <kernels/sgd/sgd_grid.h>

#include <cstring>
#include <functional>
#include <utility>
#include <vector>

namespace zeroth::test {

using kernels::GridThread;
using kernels::kMostSources;
using kernels::test::ScrambledThreads;

struct GridCalls {
  static GridKernels* one;

  /// `call(launch)` now, with a launch that runs nothing, says whether its arguments are taken; its bodies run later.
  template <class Call>
  static detail::CudaStatus later(void* stream, Call call) {
    const auto nothing = [](const auto&, std::int64_t) {};
    if (!call(nothing)) return detail::kCudaInvalidValue;
    run_later(stream, [call](ScrambledThreads& threads) {
      const auto launch = [&threads](const auto& body, std::int64_t) { threads.each(body); };
      (void)call(launch);
    });
    return detail::kCudaSuccess;
  }
  static void run_later(void* stream, std::function<void(ScrambledThreads&)> run) {
    one->gpu_.enqueue(stream, [run = std::move(run)] {
      const std::int64_t number = ++one->runs_;
      ScrambledThreads threads(1 + number % 7, static_cast<std::uint64_t>(number));
      run(threads);
    });
  }

  static int adamw(const kernels::AdamWArgs* args, void* stream) {
    return later(stream, [args = *args](const auto& launch) { return kernels::adamw_on_grid(args, launch); });
  }
  static int sgd(const kernels::SgdArgs* args, void* stream) {
    return later(stream, [args = *args](const auto& launch) { return kernels::sgd_on_grid(args, launch); });
  }
  static int bucket(const kernels::detail::BucketArgs* args, std::int64_t* nonfinite, void* stream) {
    const auto nothing = [](const auto&, std::int64_t) {};
    if (nonfinite == nullptr || !kernels::bucket_on_grid(*args, nothing)) return detail::kCudaInvalidValue;
    run_later(stream, [args = *args, nonfinite](ScrambledThreads& threads) {
      const auto launch = [&](const auto& body, std::int64_t) {
        threads.each([&](GridThread thread) { *nonfinite += body(thread); });
      };
      (void)kernels::bucket_on_grid(args, launch);
    });
    return detail::kCudaSuccess;
  }
  static int fill_zero(void* dst, std::int64_t bytes, void* stream) {
    if (bytes < 0) return detail::kCudaInvalidValue;
    run_later(stream, [=](ScrambledThreads&) { std::memset(dst, 0, static_cast<std::size_t>(bytes)); });
    return detail::kCudaSuccess;
  }
  static int gather_rows(const kernels::GatherRowsArgs* args, void* stream) {
    return later(stream, [args = *args](const auto& launch) { return kernels::gather_rows_on_grid(args, launch); });
  }
  static int norm_blocks(const void* src, DType dtype, std::int64_t n, double* sums, void* stream) {
    if (n < 0) return detail::kCudaInvalidValue;
    run_later(stream, [=](ScrambledThreads& some) {
      ScrambledThreads warps(kernels::kNormLanes * (1 + some.count() % 3), static_cast<std::uint64_t>(n));
      (void)kernels::test::norm_blocks_on(warps, src, dtype, n, sums);
    });
    return detail::kCudaSuccess;
  }
  static std::int64_t workspace_of(const kernels::SumSourcesArgs* args) {
    return static_cast<std::int64_t>(kernels::sum_workspace_bytes<kMostSources>(*args));
  }
  static int sum_sources(const kernels::SumSourcesArgs* args, void* workspace, void* stream) {
    // The arrays of the arguments are memory of the host that the caller takes back.
    const auto count = static_cast<std::size_t>(args->num_sources);
    std::vector<const void*> sources(args->sources, args->sources + count);
    std::vector<DType> dtypes;
    if (args->src_dtypes != nullptr) dtypes.assign(args->src_dtypes, args->src_dtypes + count);
    std::vector<int> groups;
    if (args->groups != nullptr) groups.assign(args->groups, args->groups + args->num_groups);
    return later(stream, [given = *args, sources, dtypes, groups, workspace](const auto& launch) {
      kernels::SumSourcesArgs own = given;
      own.sources = sources.data();
      own.src_dtypes = dtypes.empty() ? nullptr : dtypes.data();
      own.groups = groups.empty() ? nullptr : groups.data();
      return kernels::sum_on_grid<kMostSources>(own, workspace, launch);
    });
  }
};

GridKernels* GridCalls::one = nullptr;

GridKernels::GridKernels(FakeGpu& gpu)
    : gpu_(gpu),
      table_{.adamw = GridCalls::adamw,
             .sgd = GridCalls::sgd,
             .bucket = GridCalls::bucket,
             .fill_zero = GridCalls::fill_zero,
             .norm_blocks = GridCalls::norm_blocks,
             .sum_sources = GridCalls::sum_sources,
             .gather_rows = GridCalls::gather_rows,
             .sum_sources_workspace = GridCalls::workspace_of} {
  GridCalls::one = this;
}

GridKernels::~GridKernels() {
  GridCalls::one = nullptr;
}

}  // namespace zeroth::test
