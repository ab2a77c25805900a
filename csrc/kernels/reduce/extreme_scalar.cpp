#include <kernels/common/lane.h>
#include <kernels/reduce/extreme.h>

namespace zeroth::kernels::detail {
namespace {

/// bf16 and fp16 are compared as float, which holds each of their values.
float read(const BFloat16* p) {
  return Lane<float>::load(p).v;
}
float read(const Float16* p) {
  return Lane<float>::load(p).v;
}
template <class T>
T read(const T* p) {
  return *p;
}

void write_best(float value, BFloat16* p) {
  canonical(Lane<float>{value}).store(p);
}
void write_best(float value, Float16* p) {
  canonical(Lane<float>{value}).store(p);
}
void write_best(float value, float* p) {
  canonical(Lane<float>{value}).store(p);
}
void write_best(double value, double* p) {
  canonical(Lane<double>{value}).store(p);
}
template <class T>
void write_best(T value, T* p) {
  *p = value;
}

template <bool kGreatest, class T>
void extreme_range(const ExtremeSourcesArgs& args) {
  using Value = decltype(read(static_cast<const T*>(nullptr)));
  constexpr std::int64_t kBlock = 2048;
  Value best[kBlock];
  for (std::int64_t at = 0; at < args.n; at += kBlock) {
    const std::int64_t n = args.n - at < kBlock ? args.n - at : kBlock;
    const T* const first = static_cast<const T*>(args.sources[0]) + at;
    for (std::int64_t i = 0; i < n; ++i) best[i] = read(first + i);
    for (int source = 1; source < args.num_sources; ++source) {
      const T* const next = static_cast<const T*>(args.sources[source]) + at;
      for (std::int64_t i = 0; i < n; ++i) {
        const Value value = read(next + i);
        const bool better = kGreatest ? value > best[i] : value < best[i];
        best[i] = better || value != value ? value : best[i];  // a NaN stays: nothing is better than it
      }
    }
    T* const dst = static_cast<T*>(args.dst) + at;
    for (std::int64_t i = 0; i < n; ++i) write_best(best[i], dst + i);
  }
}

template <class T>
void extreme_any(const ExtremeSourcesArgs& args) {
  args.greatest ? extreme_range<true, T>(args) : extreme_range<false, T>(args);
}

}  // namespace

void extreme_sources_scalar(const ExtremeSourcesArgs& args) {
  switch (args.dtype) {
    case DType::kFloat64:
      return extreme_any<double>(args);
    case DType::kFloat32:
      return extreme_any<float>(args);
    case DType::kBFloat16:
      return extreme_any<BFloat16>(args);
    case DType::kFloat16:
      return extreme_any<Float16>(args);
    case DType::kInt64:
      return extreme_any<std::int64_t>(args);
    case DType::kInt32:
      return extreme_any<std::int32_t>(args);
    case DType::kUInt8:
      return extreme_any<std::uint8_t>(args);
  }
}

}  // namespace zeroth::kernels::detail
