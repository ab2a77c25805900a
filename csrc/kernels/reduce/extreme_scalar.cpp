#include <kernels/reduce/extreme.h>
#include <kernels/reduce/extreme_math.h>

namespace zeroth::kernels::detail {
namespace {

template <bool kGreatest, class T>
void extreme_range(const ExtremeSourcesArgs& args) {
  using Value = decltype(read_value(static_cast<const T*>(nullptr)));
  constexpr std::int64_t kBlock = 2048;
  Value best[kBlock];
  for (std::int64_t at = 0; at < args.n; at += kBlock) {
    const std::int64_t n = args.n - at < kBlock ? args.n - at : kBlock;
    const T* const first = static_cast<const T*>(args.sources[0]) + at;
    for (std::int64_t i = 0; i < n; ++i) best[i] = read_value(first + i);
    for (int source = 1; source < args.num_sources; ++source) {
      const T* const next = static_cast<const T*>(args.sources[source]) + at;
      for (std::int64_t i = 0; i < n; ++i) {
        best[i] = better_of<kGreatest>(best[i], read_value(next + i));
      }
    }
    T* const dst = static_cast<T*>(args.dst) + at;
    for (std::int64_t i = 0; i < n; ++i) write_best(best[i], dst + i);
  }
}

}  // namespace

void extreme_sources_scalar(const ExtremeSourcesArgs& args) {
  with_extreme_type(args.dtype, [&](auto type) {
    args.greatest ? extreme_range<true, decltype(type)>(args) : extreme_range<false, decltype(type)>(args);
  });
}

}  // namespace zeroth::kernels::detail
