// Memory access of the gradient buckets; included once per instruction set.
#include <kernels/bucket/bucket_math.h>
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
    bucket_sum(W::load(dst + i), value).store(dst + i);
  });
  return nonfinite;
}

template <template <class> class V>
std::int64_t bucket_any(const detail::BucketArgs& args) {
  return with_bucket_types(args.src_dtype, args.dst_dtype, [&](auto types) {
    using Types = decltype(types);
    auto* const dst = static_cast<typename Types::Out*>(args.dst);
    const auto* const src = static_cast<const typename Types::In*>(args.src);
    if constexpr (Types::kAddable) {
      if (args.add) {
        return add_range<V>(dst, src, args.n);
      }
    }
    return store_range<V, typename Types::Sum>(dst, src, args.n);
  });
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
