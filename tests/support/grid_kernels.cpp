#include "support/grid_kernels.h"

#include "support/grid_threads.h"

#include <kernels/adamw/adamw_grid.h>
#include <kernels/bucket/bucket_grid.h>
#include <kernels/lamb/lamb_grid.h>
#include <kernels/lion/lion_grid.h>
#include <kernels/lowrank/lowrank_grid.h>
#include <kernels/reduce/reduce_grid.h>
#include <kernels/rows/rows_grid.h>
#include <kernels/sgd/sgd_grid.h>
#include <kernels/signs/signs_grid.h>
#include <kernels/topk/topk_grid.h>

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
  static int lion(const kernels::LionArgs* args, void* stream) {
    return later(stream, [args = *args](const auto& launch) { return kernels::lion_on_grid(args, launch); });
  }
  static int sign_message(const kernels::SignMessageArgs* args, void* stream) {
    return later(stream, [args = *args](const auto& launch) { return kernels::sign_message_on_grid(args, launch); });
  }
  static int sign_pack(const kernels::SignPackArgs* args, void* stream) {
    return later(stream, [args = *args](const auto& launch) { return kernels::sign_pack_on_grid(args, launch); });
  }
  static int sign_sum(const kernels::SignSumArgs* args, void* stream) {
    // As of sum_sources().
    const std::vector<kernels::SignSource> sources(args->sources, args->sources + args->num_sources);
    return later(stream, [given = *args, sources](const auto& launch) {
      kernels::SignSumArgs own = given;
      own.sources = sources.data();
      return kernels::sign_sum_on_grid<kMostSources>(own, launch);
    });
  }
  static int quantize(const kernels::QuantizeArgs* args, void* stream) {
    const auto nothing = [](const auto&, std::int64_t) {};
    if (!kernels::quantize_on_grid(*args, nothing, nothing)) return detail::kCudaInvalidValue;
    run_later(stream, [args = *args](ScrambledThreads& some) {
      ScrambledThreads warps(kernels::kScaleLanes * (1 + some.count() % 3), static_cast<std::uint64_t>(args.n));
      const auto launch = [&some](const auto& body, std::int64_t) { some.each(body); };
      (void)kernels::test::quantize_on(warps, args, launch);
    });
    return detail::kCudaSuccess;
  }
  static int dequantize(const kernels::DequantizeArgs* args, void* stream) {
    const std::vector<kernels::QuantSource> sources(args->sources, args->sources + args->num_sources);
    return later(stream, [given = *args, sources](const auto& launch) {
      kernels::DequantizeArgs own = given;
      own.sources = sources.data();
      return kernels::dequantize_on_grid<kMostSources>(own, launch);
    });
  }
  /// As later(), with the launches of topk_grid.h and lowrank_grid.h.
  template <class Call>
  static detail::CudaStatus later_in_teams(void* stream, Call call) {
    if (!call(kernels::test::NoLaunch{})) return detail::kCudaInvalidValue;
    run_later(stream, [call](ScrambledThreads& threads) {
      kernels::test::ScrambledLaunch launch(threads, static_cast<std::uint64_t>(threads.count()));
      (void)call(launch);
    });
    return detail::kCudaSuccess;
  }
  static std::int64_t topk_workspace(std::int64_t n) { return kernels::topk_workspace_bytes(n); }
  static int topk(const kernels::TopkArgs* args, void* workspace, void* stream) {
    return later_in_teams(
        stream, [args = *args, workspace](auto&& launch) { return kernels::topk_on_grid(args, workspace, launch); });
  }
  static int topk_outside(const kernels::TopkAddArgs* args, std::int64_t* outside, void* stream) {
    const std::vector<kernels::TopkSource> sources(args->sources, args->sources + args->num_sources);
    run_later(stream, [given = *args, sources, outside](ScrambledThreads& threads) {
      kernels::TopkAddArgs own = given;
      own.sources = sources.data();
      const auto launch = [&](const auto& body, std::int64_t) {
        threads.each([&](GridThread thread) { *outside += body(thread); });
      };
      (void)kernels::topk_outside_on_grid(own, launch);
    });
    return detail::kCudaSuccess;
  }
  static int topk_add(const kernels::TopkAddArgs* args, void* stream) {
    const std::vector<kernels::TopkSource> sources(args->sources, args->sources + args->num_sources);
    return later(stream, [given = *args, sources](const auto& launch) {
      kernels::TopkAddArgs own = given;
      own.sources = sources.data();
      return kernels::topk_add_on_grid(own, launch);
    });
  }
  static int lowrank_product(const kernels::LowRankProductArgs* args, void* stream) {
    return later_in_teams(stream,
                          [args = *args](auto&& launch) { return kernels::lowrank_product_on_grid(args, launch); });
  }
  static int lowrank_transposed_product(const kernels::LowRankProductArgs* args, void* stream) {
    return later_in_teams(stream,
                          [args = *args](auto&& launch) { return kernels::lowrank_transposed_on_grid(args, launch); });
  }
  static int lowrank_restore(const kernels::LowRankRestoreArgs* args, void* stream) {
    return later_in_teams(stream,
                          [args = *args](auto&& launch) { return kernels::lowrank_restore_on_grid(args, launch); });
  }
  static int lowrank_orthonormalize(const kernels::OrthonormalizeArgs* args, void* stream) {
    return later_in_teams(
        stream, [args = *args](auto&& launch) { return kernels::lowrank_orthonormalize_on_grid(args, launch); });
  }
  static int lowrank_draw_missing(const kernels::LowRankDrawArgs* args, void* stream) {
    return later_in_teams(
        stream, [args = *args](auto&& launch) { return kernels::lowrank_draw_missing_on_grid(args, launch); });
  }
  static int lamb_measure(const kernels::LambArgs* args, void* stream) {
    const auto nothing = [](const auto&, std::int64_t) {};
    if (!kernels::lamb_measure_on_grid(*args, nothing)) return detail::kCudaInvalidValue;
    run_later(stream, [args = *args](ScrambledThreads& some) {
      ScrambledThreads warps(kernels::kNormLanes * (1 + some.count() % 3), static_cast<std::uint64_t>(args.n));
      (void)kernels::test::lamb_measure_on(warps, args);
    });
    return detail::kCudaSuccess;
  }
  static int lamb_apply(const kernels::LambArgs* args, void* stream) {
    return later(stream, [args = *args](const auto& launch) { return kernels::lamb_apply_on_grid(args, launch); });
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
             .lion = GridCalls::lion,
             .lamb_measure = GridCalls::lamb_measure,
             .lamb_apply = GridCalls::lamb_apply,
             .sign_message = GridCalls::sign_message,
             .sign_pack = GridCalls::sign_pack,
             .sign_sum = GridCalls::sign_sum,
             .quantize = GridCalls::quantize,
             .dequantize = GridCalls::dequantize,
             .topk_workspace = GridCalls::topk_workspace,
             .topk = GridCalls::topk,
             .topk_outside = GridCalls::topk_outside,
             .topk_add = GridCalls::topk_add,
             .lowrank_product = GridCalls::lowrank_product,
             .lowrank_transposed_product = GridCalls::lowrank_transposed_product,
             .lowrank_restore = GridCalls::lowrank_restore,
             .lowrank_orthonormalize = GridCalls::lowrank_orthonormalize,
             .lowrank_draw_missing = GridCalls::lowrank_draw_missing,
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
