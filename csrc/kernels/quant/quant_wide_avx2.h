// What quant_cpu.inl asks of AVX2 for a group of codes; only files built with -mavx2 -mfma -mf16c include it.
#pragma once

#include <kernels/common/simd_avx2.h>
#include <kernels/quant/quant_wide.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <>
struct WideCodes<Avx2> {
  static constexpr bool kThere = true;
  using Vector = Avx2<float>;
  using Bits = __m256i;

  static ZR_INLINE Vector quotient(Vector a, Vector divisor, Vector inverse) {
    const __m256 near = _mm256_mul_ps(a.v, inverse.v);
    return {_mm256_fmadd_ps(_mm256_fnmadd_ps(near, divisor.v, a.v), inverse.v, near)};
  }

  static ZR_INLINE Bits bits_of(Vector a) { return _mm256_castps_si256(a.v); }
  static ZR_INLINE Vector of_bits(Bits a) { return {_mm256_castsi256_ps(a)}; }
  static ZR_INLINE Bits splat(std::uint32_t a) { return _mm256_set1_epi32(static_cast<int>(a)); }
  static ZR_INLINE Bits splat_words(int a) { return _mm256_set1_epi16(static_cast<short>(a)); }
  static ZR_INLINE Bits both(Bits a, Bits b) { return _mm256_and_si256(a, b); }
  static ZR_INLINE Bits either(Bits a, Bits b) { return _mm256_or_si256(a, b); }
  static ZR_INLINE Bits greater(Bits a, Bits b) { return _mm256_max_epu32(a, b); }
  static ZR_INLINE Bits plus(Bits a, Bits b) { return _mm256_add_epi32(a, b); }
  static ZR_INLINE Bits minus(Bits a, Bits b) { return _mm256_sub_epi32(a, b); }
  template <int kBits>
  static ZR_INLINE Bits down(Bits a) {
    return _mm256_srli_epi32(a, kBits);
  }
  static ZR_INLINE Bits nearest(Vector a) { return _mm256_cvtps_epi32(a.v); }
  static ZR_INLINE Vector number(Bits a) { return {_mm256_cvtepi32_ps(a)}; }

  static ZR_INLINE Bits words(Bits a, Bits b) { return _mm256_packs_epi32(a, b); }
  static ZR_INLINE Bits words_plus(Bits a, Bits b) { return _mm256_add_epi16(a, b); }
  static ZR_INLINE Bits words_magnitude(Bits a) { return _mm256_abs_epi16(a); }
  static ZR_INLINE Bits words_sign(Bits a) { return _mm256_srai_epi16(a, 15); }
  static ZR_INLINE void store_bytes(Bits first, Bits second, std::uint8_t* p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes(first, second));
  }
  static ZR_INLINE void store_halves(Bits first, Bits second, std::uint8_t* p) {
    const __m256i halves = _mm256_and_si256(bytes(first, second), _mm256_set1_epi8(0x0f));
    const __m256i pairs = _mm256_maddubs_epi16(halves, _mm256_set1_epi16(0x1001));
    const __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
  }

  static ZR_INLINE Bits load_pairs(const std::uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  struct Table {
    __m256 first;   ///< of codes 0 to 7
    __m256 second;  ///< of codes 8 to 15
    static ZR_INLINE Table of(const float* sixteen, float scale) {
      const __m256 factor = _mm256_set1_ps(scale);
      return {_mm256_mul_ps(_mm256_loadu_ps(sixteen), factor), _mm256_mul_ps(_mm256_loadu_ps(sixteen + 8), factor)};
    }
    ZR_INLINE Vector lower(Bits pairs) const { return at(pairs, _mm256_slli_epi32(pairs, 28)); }
    ZR_INLINE Vector upper(Bits pairs) const { return at(_mm256_srli_epi32(pairs, 4), _mm256_slli_epi32(pairs, 24)); }

   private:
    /// The sign of `half`: which table.
    ZR_INLINE Vector at(Bits index, Bits half) const {
      return {_mm256_blendv_ps(_mm256_permutevar8x32_ps(first, index), _mm256_permutevar8x32_ps(second, index),
                               _mm256_castsi256_ps(half))};
    }
  };
  static ZR_INLINE void in_order(Vector& even, Vector& odd) {
    const __m256 low = _mm256_unpacklo_ps(even.v, odd.v);
    const __m256 high = _mm256_unpackhi_ps(even.v, odd.v);
    even.v = _mm256_permute2f128_ps(low, high, 0x20);
    odd.v = _mm256_permute2f128_ps(low, high, 0x31);
  }

  static ZR_INLINE void load_e4m3(const std::uint8_t* p, Vector& first, Vector& second) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i placed = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(kHalfParts));
    const __m256i unsigned_parts = _mm256_or_si256(placed, _mm256_set1_epi16(kHalfSign));
    const __m256i is_nan = _mm256_cmpeq_epi16(unsigned_parts, _mm256_set1_epi16(kHalfSign | kHalfNanCode));
    const __m256i parts = _mm256_or_si256(placed, _mm256_and_si256(is_nan, _mm256_set1_epi16(kHalfNan)));
    first.v = _mm256_cvtph_ps(_mm256_castsi256_si128(parts));
    second.v = _mm256_cvtph_ps(_mm256_extracti128_si256(parts, 1));
  }

 private:
  /// The bytes of words(a, b) and words(c, d), of 8 integers each, in the order a, b, c, d.
  static ZR_INLINE Bits bytes(Bits first, Bits second) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order);
  }
};

}  // namespace
}  // namespace zeroth::kernels
