// Avx2<T>: 256-bit vectors with the interface of Lane<T>. Only files built with -mavx2 -mfma include it.
#pragma once

#include <kernels/common/lane.h>

#include <immintrin.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <class T>
struct Avx2;

template <>
struct Avx2<float> {
  using Value = float;
  static constexpr std::int64_t kLanes = 8;
  __m256 v;

  static ZR_INLINE Avx2 splat(float x) { return {_mm256_set1_ps(x)}; }
  static ZR_INLINE Avx2 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static ZR_INLINE Avx2 load(const BFloat16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
  }
  ZR_INLINE void store(float* p) const { _mm256_storeu_ps(p, v); }
  ZR_INLINE void stream(float* p) const { _mm256_stream_ps(p, v); }
  ZR_INLINE void store(BFloat16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), rounded()); }
  ZR_INLINE void stream(BFloat16* p) const { _mm_stream_si128(reinterpret_cast<__m128i*>(p), rounded()); }
  static ZR_INLINE Avx2 load(const Float16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  ZR_INLINE void store(Float16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half()); }
  ZR_INLINE void stream(Float16* p) const { _mm_stream_si128(reinterpret_cast<__m128i*>(p), half()); }
  static ZR_INLINE Avx2 join(const BFloat16* high, const std::int16_t* low) {
    const __m256i upper = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(high)));
    const __m256i lower = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low)));
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(upper, 16), lower))};
  }
  ZR_INLINE void split(BFloat16* high, std::int16_t* low) const {
    const __m256i x = _mm256_castps_si256(v);
    const __m256i upper = _mm256_srli_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x8000)), 16);
    const __m256i lower = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high), packed(upper));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low), packed(lower));
  }
  ZR_INLINE int nonfinite() const {
    const __m256i exponent = _mm256_set1_epi32(0x7f800000);
    const __m256i all_ones = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(v), exponent), exponent);
    return __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(all_ones))));
  }

 private:
  ZR_INLINE __m128i half() const { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  ZR_INLINE __m128i rounded() const {
    const __m256i x = _mm256_castps_si256(v);
    const __m256i lowest = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
    const __m256i even =
        _mm256_srli_epi32(_mm256_add_epi32(x, _mm256_add_epi32(lowest, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i wide = _mm256_blendv_epi8(even, quiet, is_nan);
    return packed(wide);
  }
  /// Packs 32-bit lanes whose values fit in 16 bits, unsigned.
  static ZR_INLINE __m128i packed(__m256i wide) {
    return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  }
};

template <>
struct Avx2<double> {
  using Value = double;
  static constexpr std::int64_t kLanes = 4;
  __m256d v;

  static ZR_INLINE Avx2 splat(double x) { return {_mm256_set1_pd(x)}; }
  static ZR_INLINE Avx2 load(const double* p) { return {_mm256_loadu_pd(p)}; }
  static ZR_INLINE Avx2 load(const float* p) { return {_mm256_cvtps_pd(_mm_loadu_ps(p))}; }
  static ZR_INLINE Avx2 load(const BFloat16* p) {
    const __m128i quarter = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(quarter), 16)))};
  }
  ZR_INLINE void store(double* p) const { _mm256_storeu_pd(p, v); }
  ZR_INLINE void stream(double* p) const { _mm256_stream_pd(p, v); }
  ZR_INLINE void store(float* p) const { _mm_storeu_ps(p, _mm256_cvtpd_ps(v)); }
  ZR_INLINE void stream(float* p) const { _mm_stream_ps(p, _mm256_cvtpd_ps(v)); }
  ZR_INLINE int nonfinite() const {
    const __m256i exponent = _mm256_set1_epi64x(0x7ff0000000000000LL);
    const __m256i all_ones = _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_castpd_si256(v), exponent), exponent);
    return __builtin_popcount(static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(all_ones))));
  }
};

template <>
struct Avx2<std::uint32_t> {
  using Value = std::uint32_t;
  static constexpr std::int64_t kLanes = 8;
  __m256i v;

  static ZR_INLINE Avx2 load(const Value* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
  ZR_INLINE void store(Value* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  ZR_INLINE void stream(Value* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v); }
};

template <>
struct Avx2<std::uint64_t> {
  using Value = std::uint64_t;
  static constexpr std::int64_t kLanes = 4;
  __m256i v;

  static ZR_INLINE Avx2 load(const Value* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
  ZR_INLINE void store(Value* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  ZR_INLINE void stream(Value* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v); }
};

ZR_INLINE Avx2<float> operator+(Avx2<float> a, Avx2<float> b) {
  return {_mm256_add_ps(a.v, b.v)};
}
ZR_INLINE Avx2<float> operator-(Avx2<float> a, Avx2<float> b) {
  return {_mm256_sub_ps(a.v, b.v)};
}
ZR_INLINE Avx2<float> operator*(Avx2<float> a, Avx2<float> b) {
  return {_mm256_mul_ps(a.v, b.v)};
}
ZR_INLINE Avx2<float> operator/(Avx2<float> a, Avx2<float> b) {
  return {_mm256_div_ps(a.v, b.v)};
}
ZR_INLINE Avx2<float> fused(Avx2<float> a, Avx2<float> b, Avx2<float> c) {
  return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}
ZR_INLINE Avx2<float> root(Avx2<float> a) {
  return {_mm256_sqrt_ps(a.v)};
}
ZR_INLINE Avx2<float> canonical(Avx2<float> a) {
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kQuietNan32)));
  return {_mm256_blendv_ps(a.v, nan, _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q))};
}

ZR_INLINE Avx2<double> operator+(Avx2<double> a, Avx2<double> b) {
  return {_mm256_add_pd(a.v, b.v)};
}
ZR_INLINE Avx2<double> operator-(Avx2<double> a, Avx2<double> b) {
  return {_mm256_sub_pd(a.v, b.v)};
}
ZR_INLINE Avx2<double> operator*(Avx2<double> a, Avx2<double> b) {
  return {_mm256_mul_pd(a.v, b.v)};
}
ZR_INLINE Avx2<double> operator/(Avx2<double> a, Avx2<double> b) {
  return {_mm256_div_pd(a.v, b.v)};
}
ZR_INLINE Avx2<double> fused(Avx2<double> a, Avx2<double> b, Avx2<double> c) {
  return {_mm256_fmadd_pd(a.v, b.v, c.v)};
}
ZR_INLINE Avx2<double> root(Avx2<double> a) {
  return {_mm256_sqrt_pd(a.v)};
}
ZR_INLINE Avx2<double> canonical(Avx2<double> a) {
  const __m256d nan = _mm256_castsi256_pd(_mm256_set1_epi64x(static_cast<long long>(kQuietNan64)));
  return {_mm256_blendv_pd(a.v, nan, _mm256_cmp_pd(a.v, a.v, _CMP_UNORD_Q))};
}

ZR_INLINE Avx2<std::uint32_t> operator+(Avx2<std::uint32_t> a, Avx2<std::uint32_t> b) {
  return {_mm256_add_epi32(a.v, b.v)};
}
ZR_INLINE Avx2<std::uint64_t> operator+(Avx2<std::uint64_t> a, Avx2<std::uint64_t> b) {
  return {_mm256_add_epi64(a.v, b.v)};
}
ZR_INLINE Avx2<std::uint32_t> canonical(Avx2<std::uint32_t> a) {
  return a;
}
ZR_INLINE Avx2<std::uint64_t> canonical(Avx2<std::uint64_t> a) {
  return a;
}

}  // namespace
}  // namespace zeroth::kernels
