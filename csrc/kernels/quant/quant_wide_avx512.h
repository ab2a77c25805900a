// What quant_cpu.inl asks of AVX-512 for a group of codes; only files built with -mavx512{f,dq,bw,vl} include it.
#pragma once

#include <kernels/common/simd_avx512.h>
#include <kernels/quant/quant_wide.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <>
struct WideCodes<Avx512> {
  static constexpr bool kThere = true;
  using Vector = Avx512<float>;
  using Bits = __m512i;

  static ZR_INLINE Vector quotient(Vector a, Vector divisor, Vector inverse) {
    const __m512 near = _mm512_mul_ps(a.v, inverse.v);
    return {_mm512_fmadd_ps(_mm512_fnmadd_ps(near, divisor.v, a.v), inverse.v, near)};
  }

  static ZR_INLINE Bits bits_of(Vector a) { return _mm512_castps_si512(a.v); }
  static ZR_INLINE Vector of_bits(Bits a) { return {_mm512_castsi512_ps(a)}; }
  static ZR_INLINE Bits splat(std::uint32_t a) { return _mm512_set1_epi32(static_cast<int>(a)); }
  static ZR_INLINE Bits splat_words(int a) { return _mm512_set1_epi16(static_cast<short>(a)); }
  static ZR_INLINE Bits both(Bits a, Bits b) { return _mm512_and_si512(a, b); }
  static ZR_INLINE Bits either(Bits a, Bits b) { return _mm512_or_si512(a, b); }
  static ZR_INLINE Bits greater(Bits a, Bits b) { return _mm512_max_epu32(a, b); }
  static ZR_INLINE Bits plus(Bits a, Bits b) { return _mm512_add_epi32(a, b); }
  static ZR_INLINE Bits minus(Bits a, Bits b) { return _mm512_sub_epi32(a, b); }
  template <int kBits>
  static ZR_INLINE Bits down(Bits a) {
    return _mm512_srli_epi32(a, kBits);
  }
  static ZR_INLINE Bits nearest(Vector a) { return _mm512_cvtps_epi32(a.v); }
  static ZR_INLINE Vector number(Bits a) { return {_mm512_cvtepi32_ps(a)}; }

  static ZR_INLINE Bits words(Bits a, Bits b) { return _mm512_packs_epi32(a, b); }
  static ZR_INLINE Bits words_plus(Bits a, Bits b) { return _mm512_add_epi16(a, b); }
  static ZR_INLINE Bits words_magnitude(Bits a) { return _mm512_abs_epi16(a); }
  static ZR_INLINE Bits words_sign(Bits a) { return _mm512_srai_epi16(a, 15); }
  static ZR_INLINE void store_bytes(Bits first, Bits second, std::uint8_t* p) {
    _mm512_storeu_si512(p, bytes(first, second));
  }
  static ZR_INLINE void store_halves(Bits first, Bits second, std::uint8_t* p) {
    const __m512i halves = _mm512_and_si512(bytes(first, second), _mm512_set1_epi8(0x0f));
    const __m512i pairs = _mm512_maddubs_epi16(halves, _mm512_set1_epi16(0x1001));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(pairs));
  }

  static ZR_INLINE Bits load_pairs(const std::uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  struct Table {
    __m512 values;
    static ZR_INLINE Table of(const float* sixteen, float scale) {
      return {_mm512_mul_ps(_mm512_loadu_ps(sixteen), _mm512_set1_ps(scale))};
    }
    ZR_INLINE Vector lower(Bits pairs) const { return {_mm512_permutexvar_ps(pairs, values)}; }
    ZR_INLINE Vector upper(Bits pairs) const { return {_mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), values)}; }
  };
  static ZR_INLINE void in_order(Vector& even, Vector& odd) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    const __m512 low = _mm512_permutex2var_ps(even.v, first, odd.v);
    odd.v = _mm512_permutex2var_ps(even.v, second, odd.v);
    even.v = low;
  }

  static ZR_INLINE void load_e4m3(const std::uint8_t* p, Vector& first, Vector& second) {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i placed = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(kHalfParts));
    const __m512i unsigned_parts = _mm512_or_si512(placed, _mm512_set1_epi16(kHalfSign));
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(unsigned_parts, _mm512_set1_epi16(kHalfSign | kHalfNanCode));
    const __m512i parts = _mm512_mask_mov_epi16(placed, is_nan, _mm512_set1_epi16(kHalfNan));
    first.v = _mm512_cvtph_ps(_mm512_castsi512_si256(parts));
    second.v = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(parts, 1));
  }

 private:
  /// The bytes of words(a, b) and words(c, d), of 16 integers each, in the order a, b, c, d.
  static ZR_INLINE Bits bytes(Bits first, Bits second) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(first, second));
  }
};

}  // namespace
}  // namespace zeroth::kernels
