// The functions of moe_lanes.h for vectors of simd_avx512.h.
#pragma once

#include <kernels/common/simd_avx512.h>
#include <kernels/moe/moe_lanes.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

ZR_INLINE Avx512<float> power_of(Avx512<float> shifted) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f800000)))};
}
ZR_INLINE Avx512<double> power_of(Avx512<double> shifted) {
  const __m512i exponent = _mm512_slli_epi64(_mm512_castpd_si512(shifted.v), 52);
  return {_mm512_castsi512_pd(_mm512_add_epi64(exponent, _mm512_set1_epi64(0x3ff0000000000000LL)))};
}
ZR_INLINE Avx512<float> select_below(Avx512<float> x, Avx512<float> limit, Avx512<float> a, Avx512<float> b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), b.v, a.v)};
}
ZR_INLINE Avx512<double> select_below(Avx512<double> x, Avx512<double> limit, Avx512<double> a, Avx512<double> b) {
  return {_mm512_mask_blend_pd(_mm512_cmp_pd_mask(x.v, limit.v, _CMP_LT_OQ), b.v, a.v)};
}
ZR_INLINE unsigned above(Avx512<float> x, Avx512<float> limit) {
  return _mm512_cmp_ps_mask(x.v, limit.v, _CMP_GT_OQ);
}
ZR_INLINE unsigned above(Avx512<double> x, Avx512<double> limit) {
  return _mm512_cmp_pd_mask(x.v, limit.v, _CMP_GT_OQ);
}

}  // namespace
}  // namespace zeroth::kernels
