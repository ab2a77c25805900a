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
  static constexpr bool kChooses = false;
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
  ZR_INLINE Avx2 magnitude() const { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0F), v)}; }
  static ZR_INLINE Avx2 greater(Avx2 a, Avx2 b) {
    return {_mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a.v), _mm256_castps_si256(b.v)))};
  }
  ZR_INLINE float greatest() const {
    const __m256i x = _mm256_castps_si256(v);
    __m128i half = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
    return __builtin_bit_cast(float, _mm_cvtsi128_si32(half));
  }
  ZR_INLINE unsigned at_least(float limit) const {
    const __m256i x = _mm256_castps_si256(magnitude().v);
    const __m256i least = _mm256_max_epu32(x, _mm256_set1_epi32(__builtin_bit_cast(int, limit)));
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x, least))));
  }
  ZR_INLINE Avx2 nearest() const { return {_mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  ZR_INLINE Avx2 floor() const { return {_mm256_floor_ps(v)}; }
  ZR_INLINE Avx2 clamped(float most) const {
    return {_mm256_max_ps(_mm256_min_ps(v, _mm256_set1_ps(most)), _mm256_set1_ps(-most))};
  }
  static ZR_INLINE Avx2 uniforms(std::uint32_t seed, std::uint32_t first) {
    const auto times = [](__m256i a, std::uint32_t b) {
      return _mm256_mullo_epi32(a, _mm256_set1_epi32(static_cast<int>(b)));
    };
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i x = times(_mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first)), lanes), kSpread);
    x = _mm256_xor_si256(x, _mm256_set1_epi32(static_cast<int>(seed)));
    x = times(_mm256_xor_si256(x, _mm256_srli_epi32(x, 16)), kMixFirst);
    x = times(_mm256_xor_si256(x, _mm256_srli_epi32(x, 13)), kMixLast);
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    return {_mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(x, 8)), _mm256_set1_ps(0x1p-24F))};
  }
  ZR_INLINE void store(std::int8_t* p) const {
    const __m256i wide = _mm256_cvtps_epi32(v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
  }
  static ZR_INLINE Avx2 load(const std::int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
  }
  template <unsigned kExponent, unsigned kMantissa>
  ZR_INLINE void store_parts(std::int8_t* p) const {
    constexpr int kRest = kExponent + kMantissa;
    const __m256i x = _mm256_castps_si256(v);
    const __m256i rest = _mm256_and_si256(_mm256_srli_epi32(x, 23 - kMantissa), _mm256_set1_epi32((1 << kRest) - 1));
    const __m256i wide = _mm256_or_si256(rest, _mm256_slli_epi32(_mm256_srli_epi32(x, 31), kRest));
    const __m128i words = packed(wide);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
  }
  template <unsigned kExponent, unsigned kMantissa>
  static ZR_INLINE Avx2 load_parts(const std::int8_t* p) {
    constexpr int kRest = kExponent + kMantissa;
    constexpr int kParts = static_cast<int>(0x80000000U | ((1U << kRest) - 1U) << (23U - kMantissa));
    const __m256i code = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    // Copies of the sign fill what lies between it and the exponent; the mask takes them away.
    const __m256i placed = _mm256_srai_epi32(_mm256_slli_epi32(code, 31 - kRest), 8 - kExponent);
    return {_mm256_castsi256_ps(_mm256_and_si256(placed, _mm256_set1_epi32(kParts)))};
  }
  ZR_INLINE Avx2 power() const { return {_mm256_and_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000)))}; }
  ZR_INLINE Avx2 nan_above(float limit) const {
    return {_mm256_or_ps(v, _mm256_cmp_ps(magnitude().v, _mm256_set1_ps(limit), _CMP_GT_OQ))};
  }
  ZR_INLINE unsigned below_zero() const {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_LT_OQ)));
  }
  ZR_INLINE Avx2 sign() const {
    const __m256 one = _mm256_or_ps(_mm256_and_ps(v, _mm256_set1_ps(-0.0F)), _mm256_set1_ps(1.0F));
    return {_mm256_blendv_ps(v, one, _mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_NEQ_OQ))};
  }
  static ZR_INLINE Avx2 signed_by(unsigned positive, Avx2 s) {
    const __m256i word = _mm256_set1_epi32(static_cast<int>(positive));
    return turned(word, 0, {_mm256_xor_ps(s.v, _mm256_set1_ps(-0.0F))});
  }
  /// 32 bits in memory, for turned().
  using Word = __m256i;
  static ZR_INLINE Word word_of(const std::uint8_t* p) {
    int word = 0;
    __builtin_memcpy(&word, p, sizeof(word));
    return _mm256_set1_epi32(word);
  }
  /// Lane k is -s where bit first + k of the word is set, else s.
  static ZR_INLINE Avx2 turned(Word word, int first, Avx2 s) {
    const __m256i lanes = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    const __m256i placed = _mm256_sllv_epi32(word, _mm256_sub_epi32(lanes, _mm256_set1_epi32(first)));
    return {_mm256_xor_ps(s.v, _mm256_and_ps(_mm256_castsi256_ps(placed), _mm256_set1_ps(-0.0F)))};
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
  ZR_INLINE unsigned below_zero() const {
    return static_cast<unsigned>(_mm256_movemask_pd(_mm256_cmp_pd(v, _mm256_setzero_pd(), _CMP_LT_OQ)));
  }
  ZR_INLINE Avx2 sign() const {
    const __m256d one = _mm256_or_pd(_mm256_and_pd(v, _mm256_set1_pd(-0.0)), _mm256_set1_pd(1.0));
    return {_mm256_blendv_pd(v, one, _mm256_cmp_pd(v, _mm256_setzero_pd(), _CMP_NEQ_OQ))};
  }
  static ZR_INLINE Avx2 signed_by(unsigned positive, Avx2 s) {
    const __m256i bits = _mm256_setr_epi64x(1, 2, 4, 8);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi64x(static_cast<long long>(positive)), bits);
    const __m256d negative = _mm256_castsi256_pd(_mm256_cmpeq_epi64(set, _mm256_setzero_si256()));
    return {_mm256_xor_pd(s.v, _mm256_and_pd(negative, _mm256_set1_pd(-0.0)))};
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
