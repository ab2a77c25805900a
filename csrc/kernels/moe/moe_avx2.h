// The functions of moe_lanes.h for vectors of simd_avx2.h.
#pragma once

#include <kernels/common/simd_avx2.h>
#include <kernels/moe/moe_lanes.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

ZR_INLINE Avx2<float> power_of(Avx2<float> shifted) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted.v), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000)))};
}
ZR_INLINE Avx2<double> power_of(Avx2<double> shifted) {
  const __m256i exponent = _mm256_slli_epi64(_mm256_castpd_si256(shifted.v), 52);
  return {_mm256_castsi256_pd(_mm256_add_epi64(exponent, _mm256_set1_epi64x(0x3ff0000000000000LL)))};
}
ZR_INLINE Avx2<float> select_below(Avx2<float> x, Avx2<float> limit, Avx2<float> a, Avx2<float> b) {
  return {_mm256_blendv_ps(b.v, a.v, _mm256_cmp_ps(x.v, limit.v, _CMP_LT_OQ))};
}
ZR_INLINE Avx2<double> select_below(Avx2<double> x, Avx2<double> limit, Avx2<double> a, Avx2<double> b) {
  return {_mm256_blendv_pd(b.v, a.v, _mm256_cmp_pd(x.v, limit.v, _CMP_LT_OQ))};
}
ZR_INLINE unsigned above(Avx2<float> x, Avx2<float> limit) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(x.v, limit.v, _CMP_GT_OQ)));
}
ZR_INLINE unsigned above(Avx2<double> x, Avx2<double> limit) {
  return static_cast<unsigned>(_mm256_movemask_pd(_mm256_cmp_pd(x.v, limit.v, _CMP_GT_OQ)));
}

}  // namespace
}  // namespace zeroth::kernels
