// Pack<T, n>: n neighbouring elements with the interface of a SIMD vector. One thread of a CUDA kernel reads, computes
// and writes one pack at once. Every element is a Lane<T>, so the bits are those of the scalar kernels. Internal
// linkage, see arch.h.
#pragma once

#include <kernels/common/lane.h>

#include <cstdint>
#include <type_traits>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Elements in memory, aligned so that a thread moves them in words of up to 16 bytes, the widest words.
template <class T, int kCount>
struct alignas(kCount * sizeof(T) > 16 ? 16 : kCount * sizeof(T)) Elements {
  T element[kCount];
};

/// `p` is aligned as Elements<T, kCount>.
template <int kCount, class T>
ZR_HOST_DEVICE ZR_INLINE Elements<T, kCount> load_elements(const T* p) {
  return *reinterpret_cast<const Elements<T, kCount>*>(p);
}
template <int kCount, class T>
ZR_HOST_DEVICE ZR_INLINE void store_elements(T* p, const Elements<T, kCount>& elements) {
  *reinterpret_cast<Elements<T, kCount>*>(p) = elements;
}

template <class T, int kCount>
struct Pack {
  using Value = T;
  static constexpr std::int64_t kLanes = kCount;
  T v[kCount];

  /// lane(k) is the Lane<T> number k.
  template <class MakeLane>
  ZR_HOST_DEVICE static ZR_INLINE Pack of(const MakeLane& lane) {
    Pack pack;
    for (int k = 0; k < kCount; ++k) {
      pack.v[k] = lane(k).v;
    }
    return pack;
  }
  ZR_HOST_DEVICE ZR_INLINE Lane<T> operator[](int k) const { return {v[k]}; }

  ZR_HOST_DEVICE static ZR_INLINE Pack splat(T x) {
    return of([&](int) { return Lane<T>{x}; });
  }
  template <class In>
  ZR_HOST_DEVICE static ZR_INLINE Pack load(const In* p) {
    const Elements<In, kCount> in = load_elements<kCount>(p);
    return of([&](int k) { return Lane<T>::load(in.element + k); });
  }
  template <class Out>
  ZR_HOST_DEVICE ZR_INLINE void store(Out* p) const {
    Elements<Out, kCount> out;
    for (int k = 0; k < kCount; ++k) {
      (*this)[k].store(out.element + k);
    }
    store_elements(p, out);
  }
  ZR_HOST_DEVICE static ZR_INLINE Pack join(const BFloat16* high, const std::int16_t* low) {
    const Elements<BFloat16, kCount> upper = load_elements<kCount>(high);
    const Elements<std::int16_t, kCount> lower = load_elements<kCount>(low);
    return of([&](int k) { return Lane<T>::join(upper.element + k, lower.element + k); });
  }
  ZR_HOST_DEVICE ZR_INLINE void split(BFloat16* high, std::int16_t* low) const {
    Elements<BFloat16, kCount> upper;
    Elements<std::int16_t, kCount> lower;
    for (int k = 0; k < kCount; ++k) {
      (*this)[k].split(upper.element + k, lower.element + k);
    }
    store_elements(high, upper);
    store_elements(low, lower);
  }
  ZR_HOST_DEVICE ZR_INLINE Pack sign() const {
    return of([&](int k) { return (*this)[k].sign(); });
  }
  ZR_HOST_DEVICE ZR_INLINE int nonfinite() const {
    int count = 0;
    for (int k = 0; k < kCount; ++k) {
      count += (*this)[k].nonfinite();
    }
    return count;
  }
};

template <class T, int kCount>
ZR_HOST_DEVICE ZR_INLINE Pack<T, kCount> operator+(const Pack<T, kCount>& a, const Pack<T, kCount>& b) {
  return Pack<T, kCount>::of([&](int k) { return a[k] + b[k]; });
}
template <class T, int kCount>
ZR_HOST_DEVICE ZR_INLINE Pack<T, kCount> operator-(const Pack<T, kCount>& a, const Pack<T, kCount>& b) {
  return Pack<T, kCount>::of([&](int k) { return a[k] - b[k]; });
}
template <class T, int kCount>
ZR_HOST_DEVICE ZR_INLINE Pack<T, kCount> operator*(const Pack<T, kCount>& a, const Pack<T, kCount>& b) {
  return Pack<T, kCount>::of([&](int k) { return a[k] * b[k]; });
}
template <class T, int kCount>
ZR_HOST_DEVICE ZR_INLINE Pack<T, kCount> operator/(const Pack<T, kCount>& a, const Pack<T, kCount>& b) {
  return Pack<T, kCount>::of([&](int k) { return a[k] / b[k]; });
}
template <class T, int kCount>
ZR_HOST_DEVICE ZR_INLINE Pack<T, kCount> fused(const Pack<T, kCount>& a, const Pack<T, kCount>& b,
                                               const Pack<T, kCount>& c) {
  return Pack<T, kCount>::of([&](int k) { return fused(a[k], b[k], c[k]); });
}
template <class T, int kCount>
ZR_HOST_DEVICE ZR_INLINE Pack<T, kCount> root(const Pack<T, kCount>& a) {
  return Pack<T, kCount>::of([&](int k) { return root(a[k]); });
}
template <class T, int kCount>
ZR_HOST_DEVICE ZR_INLINE Pack<T, kCount> canonical(const Pack<T, kCount>& a) {
  return Pack<T, kCount>::of([&](int k) { return canonical(a[k]); });
}

/// A single element needs no more alignment than its type: it is a Lane.
template <class T, int kCount>
using PackOf = std::conditional_t<kCount == 1, Lane<T>, Pack<T, kCount>>;

}  // namespace
}  // namespace zeroth::kernels
