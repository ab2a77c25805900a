// Avx512<T>: 512-bit vectors with the interface of Lane<T>. Only files built with -mavx512{f,dq,bw,vl} include it.
#pragma once

#include <kernels/common/lane.h>

#include <immintrin.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// vfpclass selector: quiet NaN, +infinity, -infinity, signalling NaN.
inline constexpr int kNonfiniteClasses = 0x01 | 0x08 | 0x10 | 0x80;

template <class T>
struct Avx512;

template <>
struct Avx512<float> {
  using Value = float;
  static constexpr std::int64_t kLanes = 16;
  __m512 v;

  static ZR_INLINE Avx512 splat(float x) { return {_mm512_set1_ps(x)}; }
  static ZR_INLINE Avx512 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static ZR_INLINE Avx512 load(const BFloat16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }
  ZR_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
  ZR_INLINE void stream(float* p) const { _mm512_stream_ps(p, v); }
  ZR_INLINE void store(BFloat16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded()); }
  ZR_INLINE void stream(BFloat16* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), rounded()); }
  static ZR_INLINE Avx512 load(const Float16* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  ZR_INLINE void store(Float16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half()); }
  ZR_INLINE void stream(Float16* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), half()); }
  static ZR_INLINE Avx512 join(const BFloat16* high, const std::int16_t* low) {
    const __m512i upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)));
    const __m512i lower = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)));
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(upper, 16), lower))};
  }
  ZR_INLINE void split(BFloat16* high, std::int16_t* low) const {
    const __m512i x = _mm512_castps_si512(v);
    const __m512i upper = _mm512_srli_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x8000)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm512_cvtepi32_epi16(upper));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm512_cvtepi32_epi16(x));
  }
  ZR_INLINE int nonfinite() const { return __builtin_popcount(_mm512_fpclass_ps_mask(v, kNonfiniteClasses)); }

 private:
  ZR_INLINE __m256i half() const { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // Not vcvtneps2bf16: that instruction flushes denormals.
  ZR_INLINE __m256i rounded() const {
    const __m512i x = _mm512_castps_si512(v);
    const __m512i high = _mm512_srli_epi32(x, 16);
    const __m512i lowest = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i even =
        _mm512_srli_epi32(_mm512_add_epi32(x, _mm512_add_epi32(lowest, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(even, is_nan, high, _mm512_set1_epi32(0x40)));
  }
};

template <>
struct Avx512<double> {
  using Value = double;
  static constexpr std::int64_t kLanes = 8;
  __m512d v;

  static ZR_INLINE Avx512 splat(double x) { return {_mm512_set1_pd(x)}; }
  static ZR_INLINE Avx512 load(const double* p) { return {_mm512_loadu_pd(p)}; }
  static ZR_INLINE Avx512 load(const float* p) { return {_mm512_cvtps_pd(_mm256_loadu_ps(p))}; }
  static ZR_INLINE Avx512 load(const BFloat16* p) {
    const __m128i quarter = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(quarter), 16)))};
  }
  ZR_INLINE void store(double* p) const { _mm512_storeu_pd(p, v); }
  ZR_INLINE void stream(double* p) const { _mm512_stream_pd(p, v); }
  ZR_INLINE void store(float* p) const { _mm256_storeu_ps(p, _mm512_cvtpd_ps(v)); }
  ZR_INLINE void stream(float* p) const { _mm256_stream_ps(p, _mm512_cvtpd_ps(v)); }
  ZR_INLINE int nonfinite() const { return __builtin_popcount(_mm512_fpclass_pd_mask(v, kNonfiniteClasses)); }
};

template <>
struct Avx512<std::uint32_t> {
  using Value = std::uint32_t;
  static constexpr std::int64_t kLanes = 16;
  __m512i v;

  static ZR_INLINE Avx512 load(const Value* p) { return {_mm512_loadu_si512(p)}; }
  ZR_INLINE void store(Value* p) const { _mm512_storeu_si512(p, v); }
  ZR_INLINE void stream(Value* p) const { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v); }
};

template <>
struct Avx512<std::uint64_t> {
  using Value = std::uint64_t;
  static constexpr std::int64_t kLanes = 8;
  __m512i v;

  static ZR_INLINE Avx512 load(const Value* p) { return {_mm512_loadu_si512(p)}; }
  ZR_INLINE void store(Value* p) const { _mm512_storeu_si512(p, v); }
  ZR_INLINE void stream(Value* p) const { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v); }
};

ZR_INLINE Avx512<float> operator+(Avx512<float> a, Avx512<float> b) {
  return {_mm512_add_ps(a.v, b.v)};
}
ZR_INLINE Avx512<float> operator-(Avx512<float> a, Avx512<float> b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
ZR_INLINE Avx512<float> operator*(Avx512<float> a, Avx512<float> b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
ZR_INLINE Avx512<float> operator/(Avx512<float> a, Avx512<float> b) {
  return {_mm512_div_ps(a.v, b.v)};
}
ZR_INLINE Avx512<float> fused(Avx512<float> a, Avx512<float> b, Avx512<float> c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
ZR_INLINE Avx512<float> root(Avx512<float> a) {
  return {_mm512_sqrt_ps(a.v)};
}
ZR_INLINE Avx512<float> canonical(Avx512<float> a) {
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(kQuietNan32)));
  return {_mm512_mask_mov_ps(a.v, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), nan)};
}

ZR_INLINE Avx512<double> operator+(Avx512<double> a, Avx512<double> b) {
  return {_mm512_add_pd(a.v, b.v)};
}
ZR_INLINE Avx512<double> operator-(Avx512<double> a, Avx512<double> b) {
  return {_mm512_sub_pd(a.v, b.v)};
}
ZR_INLINE Avx512<double> operator*(Avx512<double> a, Avx512<double> b) {
  return {_mm512_mul_pd(a.v, b.v)};
}
ZR_INLINE Avx512<double> operator/(Avx512<double> a, Avx512<double> b) {
  return {_mm512_div_pd(a.v, b.v)};
}
ZR_INLINE Avx512<double> fused(Avx512<double> a, Avx512<double> b, Avx512<double> c) {
  return {_mm512_fmadd_pd(a.v, b.v, c.v)};
}
ZR_INLINE Avx512<double> root(Avx512<double> a) {
  return {_mm512_sqrt_pd(a.v)};
}
ZR_INLINE Avx512<double> canonical(Avx512<double> a) {
  const __m512d nan = _mm512_castsi512_pd(_mm512_set1_epi64(static_cast<long long>(kQuietNan64)));
  return {_mm512_mask_mov_pd(a.v, _mm512_cmp_pd_mask(a.v, a.v, _CMP_UNORD_Q), nan)};
}

ZR_INLINE Avx512<std::uint32_t> operator+(Avx512<std::uint32_t> a, Avx512<std::uint32_t> b) {
  return {_mm512_add_epi32(a.v, b.v)};
}
ZR_INLINE Avx512<std::uint64_t> operator+(Avx512<std::uint64_t> a, Avx512<std::uint64_t> b) {
  return {_mm512_add_epi64(a.v, b.v)};
}
ZR_INLINE Avx512<std::uint32_t> canonical(Avx512<std::uint32_t> a) {
  return a;
}
ZR_INLINE Avx512<std::uint64_t> canonical(Avx512<std::uint64_t> a) {
  return a;
}

}  // namespace
}  // namespace zeroth::kernels
