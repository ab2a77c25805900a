// extreme_sources on a grid, see common/grid.h.
#pragma once

#include <kernels/common/grid.h>
#include <kernels/reduce/extreme.h>
#include <kernels/reduce/extreme_math.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// One launch. As for sums, more sources than one launch takes go through a workspace. They do not go through dst,
/// because dst may be one of the later sources.
template <class T, bool kGreatest, int kLanes, int kMost>
struct ExtremeGrid {
  using Value = decltype(read_value(static_cast<const T*>(nullptr)));
  T* out;
  const T* running;  ///< the result of earlier launches, or null
  std::int64_t n;
  int num_sources;
  const void* source[kMost];

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for_each_pack<kLanes>(thread, n, [&](auto lanes, std::int64_t i) {
      constexpr int kCount = decltype(lanes)::kValue;
      Value best[kCount];
      int next = 0;
      const auto first =
          load_elements<kCount>((running != nullptr ? running : static_cast<const T*>(source[next++])) + i);
      for (int k = 0; k < kCount; ++k) {
        best[k] = read_value(first.element + k);
      }
      for (; next < num_sources; ++next) {
        const auto values = load_elements<kCount>(static_cast<const T*>(source[next]) + i);
        for (int k = 0; k < kCount; ++k) {
          best[k] = better_of<kGreatest>(best[k], read_value(values.element + k));
        }
      }
      Elements<T, kCount> result;
      for (int k = 0; k < kCount; ++k) {
        write_best(best[k], result.element + k);
      }
      store_elements(out + i, result);
    });
  }
};

template <int kMost>
std::int64_t extreme_workspace_bytes(const ExtremeSourcesArgs& args) {
  return args.num_sources <= kMost || args.n <= 0 ? 0 : args.n * static_cast<std::int64_t>(size_of(args.dtype));
}

template <class T, bool kGreatest, int kLanes, int kMost, class Launch>
void launch_extreme(const ExtremeSourcesArgs& args, void* workspace, Launch& launch) {
  auto* const between = static_cast<T*>(workspace);
  for_each_source_part<kMost>(args.num_sources, [&](const SourcePart& part) {
    ExtremeGrid<T, kGreatest, kLanes, kMost> grid{
        part.ends ? static_cast<T*>(args.dst) : between, part.resumes ? between : nullptr, args.n, part.count, {}};
    for (int k = 0; k < part.count; ++k) {
      grid.source[k] = args.sources[part.first + k];
    }
    launch(grid, threads_for<kLanes>(args.n));
  });
}

template <int kMost = kMostSources, class Launch>
bool extreme_on_grid(const ExtremeSourcesArgs& args, void* workspace, Launch& launch) {
  if (args.n < 0 || args.num_sources < 1 || (workspace == nullptr && extreme_workspace_bytes<kMost>(args) != 0)) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  return with_extreme_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    bool packable = is_packable(static_cast<const T*>(args.dst)) && is_packable(static_cast<const T*>(workspace));
    for (int k = 0; k < args.num_sources; ++k) {
      packable = packable && is_packable(static_cast<const T*>(args.sources[k]));
    }
    with_flag(args.greatest, [&](auto greatest) {
      with_packs(packable, [&](auto lanes) {
        launch_extreme<T, decltype(greatest)::kValue, decltype(lanes)::kValue, kMost>(args, workspace, launch);
      });
    });
  });
}

}  // namespace
}  // namespace zeroth::kernels
