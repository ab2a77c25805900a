// Memory access of the gradient buckets; included once per instruction set.
#include <kernels/bucket/bucket_variants.h>
#include <kernels/common/loops.h>

namespace zeroth::kernels {
namespace {

/// Lanes of type T.
template <template <class> class V, class T, class Out, class In>
std::int64_t store_range(Out* dst, const In* src, std::int64_t n) {
  std::int64_t nonfinite = 0;
  for_each_written<V, T>(dst, n, [&](auto width, std::int64_t i, auto stores) {
    const auto value = decltype(width)::Vector::load(src + i);
    nonfinite += value.nonfinite();
    write<stores.kStream>(value, dst + i);
  });
  return nonfinite;
}

template <template <class> class V, class Out, class In>
std::int64_t add_range(Out* dst, const In* src, std::int64_t n) {
  std::int64_t nonfinite = 0;
  for_each_vector<V, Out>(0, n, [&](auto width, std::int64_t i) {
    using W = typename decltype(width)::Vector;
    const W value = W::load(src + i);
    nonfinite += value.nonfinite();
    canonical(W::load(dst + i) + value).store(dst + i);
  });
  return nonfinite;
}

template <template <class> class V, class Out, class In>
std::int64_t bucket_typed(const detail::BucketArgs& args) {
  Out* const dst = static_cast<Out*>(args.dst);
  const In* const src = static_cast<const In*>(args.src);
  return args.add ? add_range<V>(dst, src, args.n) : store_range<V, Out>(dst, src, args.n);
}

template <template <class> class V>
std::int64_t bucket_any(const detail::BucketArgs& args) {
  switch (args.src_dtype) {
    case DType::kFloat64:
      return bucket_typed<V, double, double>(args);
    case DType::kBFloat16:
      if (args.dst_dtype == DType::kBFloat16) {
        return store_range<V, float>(
            static_cast<BFloat16*>(args.dst), static_cast<const BFloat16*>(args.src), args.n);
      }
      return bucket_typed<V, float, BFloat16>(args);
    default:
      return bucket_typed<V, float, float>(args);
  }
}

template <template <class> class V>
void fill_zero_any(void* dst, std::int64_t bytes) {
  auto* const bytes_at = static_cast<unsigned char*>(dst);
  if (bytes < kStreamBytes) {
    __builtin_memset(bytes_at, 0, static_cast<std::size_t>(bytes));
    return;
  }
  const std::int64_t head = elements_until_aligned(bytes_at, bytes);
  const std::int64_t words = (bytes - head) / 4;
  __builtin_memset(bytes_at, 0, static_cast<std::size_t>(head));
  auto* const aligned = reinterpret_cast<float*>(bytes_at + head);
  for_each_written<V, float>(aligned, words, [&](auto width, std::int64_t i, auto stores) {
    write<stores.kStream>(decltype(width)::Vector::splat(0.0F), aligned + i);
  });
  __builtin_memset(bytes_at + head + 4 * words, 0, static_cast<std::size_t>(bytes - head - 4 * words));
}

}  // namespace
}  // namespace zeroth::kernels
