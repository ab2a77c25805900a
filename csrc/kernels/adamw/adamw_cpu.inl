// Memory access of AdamW around adamw_math.h; included once per instruction set.
#include <kernels/adamw/adamw_math.h>
#include <kernels/adamw/adamw_variants.h>
#include <kernels/common/loops.h>

namespace zeroth::kernels {
namespace {

// No software prefetch: on flat arrays with huge pages the hardware keeps up, and measured distances of 2 to
// 4 KiB cost 0 to 10 % (benchmarks/kernels/adamw_bench).
template <class T>
struct AdamWArrays {
  T* param;
  T* exp_avg;
  T* exp_avg_sq;
  const T* grad;
  BFloat16* copy_out;
};

/// Updates the lanes of one vector at element i and returns the new parameters.
template <bool kL2, class W, class T>
ZR_INLINE W adamw_update(const AdamWFactors<W>& factors, const AdamWArrays<T>& a, std::int64_t i) {
  const AdamWState<W> old{W::load(a.param + i), W::load(a.exp_avg + i), W::load(a.exp_avg_sq + i)};
  const AdamWState<W> next = adamw_element<kL2>(factors, W::load(a.grad + i), old);
  next.param.store(a.param + i);
  next.exp_avg.store(a.exp_avg + i);
  next.exp_avg_sq.store(a.exp_avg_sq + i);
  return next.param;
}

/// The part of [begin, n) that fills whole lines of the copy-out, which are written past the caches: the copy
/// is read next by other ranks. copy_out + begin lies at a line. Returns the end of that part.
template <bool kL2, class W, class T>
ZR_INLINE std::int64_t adamw_stream_copy(const AdamWFactors<W>& factors,
                                         const AdamWArrays<T>& a,
                                         std::int64_t begin,
                                         std::int64_t n) {
  constexpr std::int64_t kVectors = kStreamAlign / static_cast<std::int64_t>(sizeof(BFloat16)) / W::kLanes;
  std::int64_t i = begin;
  for (; i + kVectors * W::kLanes <= n; i += kVectors * W::kLanes) {
    W next[kVectors];
    for (std::int64_t k = 0; k < kVectors; ++k) {
      next[k] = adamw_update<kL2>(factors, a, i + k * W::kLanes);
    }
    for (std::int64_t k = 0; k < kVectors; ++k) {
      next[k].stream(a.copy_out + i + k * W::kLanes);
    }
  }
  stream_fence();
  return i;
}

template <template <class> class V, class T, bool kCopyOut, bool kL2>
void adamw_range(const AdamWArgs& args) {
  const AdamWArrays<T> arrays{static_cast<T*>(args.param),
                              static_cast<T*>(args.exp_avg),
                              static_cast<T*>(args.exp_avg_sq),
                              static_cast<const T*>(args.grad),
                              args.copy_out};
  const std::int64_t n = args.n;
  const auto wide = AdamWFactors<V<T>>::from(args.coefficients);
  const auto single = AdamWFactors<Lane<T>>::from(args.coefficients);
  const auto update = [&](const auto& factors, std::int64_t i) {
    const auto next = adamw_update<kL2>(factors, arrays, i);
    if constexpr (kCopyOut) {
      next.store(arrays.copy_out + i);
    }
  };
  std::int64_t i = 0;
  if constexpr (kCopyOut) {
    if (wants_streaming(arrays.copy_out, n)) {
      const std::int64_t head = elements_until_aligned(arrays.copy_out, n);
      for (; i < head; ++i) {
        update(single, i);
      }
      i = adamw_stream_copy<kL2>(wide, arrays, i, n);
    }
  }
  for (; i + V<T>::kLanes <= n; i += V<T>::kLanes) {
    update(wide, i);
  }
  for (; i < n; ++i) {
    update(single, i);
  }
}

template <template <class> class V>
void adamw_any(const AdamWArgs& args) {
  with_flag(args.coefficients.l2 != 0.0, [&](auto l2) {
    if (args.dtype == DType::kFloat64) {
      adamw_range<V, double, false, l2.kValue>(args);
    } else if (args.copy_out != nullptr) {
      adamw_range<V, float, true, l2.kValue>(args);
    } else {
      adamw_range<V, float, false, l2.kValue>(args);
    }
  });
}

}  // namespace
}  // namespace zeroth::kernels
