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
  static constexpr bool kChooses = true;
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
  ZR_INLINE Avx512 magnitude() const {
    return {_mm512_castsi512_ps(_mm512_and_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff)))};
  }
  static ZR_INLINE Avx512 greater(Avx512 a, Avx512 b) {
    return {_mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
  }
  ZR_INLINE float greatest() const {
    return __builtin_bit_cast(float, _mm512_reduce_max_epu32(_mm512_castps_si512(v)));
  }
  ZR_INLINE unsigned at_least(float limit) const {
    const __m512i least = _mm512_set1_epi32(__builtin_bit_cast(int, limit));
    return _mm512_cmpge_epu32_mask(_mm512_castps_si512(magnitude().v), least);
  }
  ZR_INLINE Avx512 nearest() const { return {_mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  ZR_INLINE Avx512 floor() const { return {_mm512_roundscale_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
  ZR_INLINE Avx512 clamped(float most) const {
    return {_mm512_max_ps(_mm512_min_ps(v, _mm512_set1_ps(most)), _mm512_set1_ps(-most))};
  }
  static ZR_INLINE Avx512 uniforms(std::uint32_t seed, std::uint32_t first) {
    const auto times = [](__m512i a, std::uint32_t b) {
      return _mm512_mullo_epi32(a, _mm512_set1_epi32(static_cast<int>(b)));
    };
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i x = times(_mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)), lanes), kSpread);
    x = _mm512_xor_si512(x, _mm512_set1_epi32(static_cast<int>(seed)));
    x = times(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), kMixFirst);
    x = times(_mm512_xor_si512(x, _mm512_srli_epi32(x, 13)), kMixLast);
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    return {_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(x, 8)), _mm512_set1_ps(0x1p-24F))};
  }
  ZR_INLINE void store(std::int8_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
  }
  static ZR_INLINE Avx512 load(const std::int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
  }
  template <unsigned kExponent, unsigned kMantissa>
  ZR_INLINE void store_parts(std::int8_t* p) const {
    constexpr unsigned kRest = kExponent + kMantissa;
    const __m512i x = _mm512_castps_si512(v);
    const __m512i rest = _mm512_and_epi32(_mm512_srli_epi32(x, 23 - kMantissa), _mm512_set1_epi32((1 << kRest) - 1));
    const __m512i wide = _mm512_or_epi32(rest, _mm512_slli_epi32(_mm512_srli_epi32(x, 31), kRest));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(wide));
  }
  template <unsigned kExponent, unsigned kMantissa>
  static ZR_INLINE Avx512 load_parts(const std::int8_t* p) {
    constexpr unsigned kRest = kExponent + kMantissa;
    constexpr int kParts = static_cast<int>(0x80000000U | ((1U << kRest) - 1U) << (23U - kMantissa));
    const __m512i code = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    // Copies of the sign fill what lies between it and the exponent; the mask takes them away.
    const __m512i placed = _mm512_srai_epi32(_mm512_slli_epi32(code, 31 - kRest), 8 - kExponent);
    return {_mm512_castsi512_ps(_mm512_and_epi32(placed, _mm512_set1_epi32(kParts)))};
  }
  ZR_INLINE Avx512 power() const { return {_mm512_and_ps(v, _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000)))}; }
  ZR_INLINE Avx512 nan_above(float limit) const {
    const __mmask16 above = _mm512_cmp_ps_mask(magnitude().v, _mm512_set1_ps(limit), _CMP_GT_OQ);
    return {_mm512_mask_mov_ps(v, above, _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(kQuietNan32))))};
  }
  ZR_INLINE unsigned below_zero() const { return _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_LT_OQ); }
  ZR_INLINE Avx512 sign() const {
    const __m512 one = _mm512_or_ps(_mm512_and_ps(v, _mm512_set1_ps(-0.0F)), _mm512_set1_ps(1.0F));
    return {_mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NEQ_OQ), one)};
  }
  static ZR_INLINE Avx512 signed_by(unsigned positive, Avx512 s) {
    const auto negative = static_cast<__mmask16>(~positive);
    return {_mm512_mask_xor_ps(s.v, negative, s.v, _mm512_set1_ps(-0.0F))};
  }

  /// The lanes whose bits of `chosen` are set, side by side, and their numbers from `first` on. Writes kLanes elements
  /// to both.
  ZR_INLINE void store_chosen(unsigned chosen, std::int32_t first, float* values, std::int32_t* numbers) const {
    const auto mask = static_cast<__mmask16>(chosen);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i all = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
    // Not to memory: that form is slow on some processors.
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(mask, v));
    _mm512_storeu_si512(numbers, _mm512_maskz_compress_epi32(mask, all));
  }
  /// 32 bits in memory, for turned().
  using Word = __m512i;
  static ZR_INLINE Word word_of(const std::uint8_t* p) {
    int word = 0;
    __builtin_memcpy(&word, p, sizeof(word));
    return _mm512_set1_epi32(word);
  }
  /// Lane k is -s where bit first + k of the word is set, else s.
  static ZR_INLINE Avx512 turned(Word word, int first, Avx512 s) {
    const __m512i lanes = _mm512_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16);
    const __m512i placed = _mm512_sllv_epi32(word, _mm512_sub_epi32(lanes, _mm512_set1_epi32(first)));
    const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000U));
    constexpr int kFirstXorBoth = 0x78;  // a ^ (b & c)
    return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(s.v), placed, sign, kFirstXorBoth))};
  }

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
  ZR_INLINE unsigned below_zero() const { return _mm512_cmp_pd_mask(v, _mm512_setzero_pd(), _CMP_LT_OQ); }
  ZR_INLINE Avx512 sign() const {
    const __m512d one = _mm512_or_pd(_mm512_and_pd(v, _mm512_set1_pd(-0.0)), _mm512_set1_pd(1.0));
    return {_mm512_mask_mov_pd(v, _mm512_cmp_pd_mask(v, _mm512_setzero_pd(), _CMP_NEQ_OQ), one)};
  }
  static ZR_INLINE Avx512 signed_by(unsigned positive, Avx512 s) {
    const auto negative = static_cast<__mmask8>(~positive);
    return {_mm512_mask_xor_pd(s.v, negative, s.v, _mm512_set1_pd(-0.0))};
  }
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
