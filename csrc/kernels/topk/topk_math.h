// The arithmetic of topk.h for one vector (or lane) of elements.
#pragma once

#include <kernels/common/lane.h>
#include <kernels/topk/topk.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Places are std::int32_t.
inline constexpr std::int64_t kMostTopkElements = 0x7fffffff;

constexpr bool has_topk(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

/// The lowest bit of a level's digit, in the 31 bits of a magnitude, and how many values it has.
ZR_HOST_DEVICE constexpr unsigned topk_shift(int level) {
  return level == 0 ? 20U : (level == 1 ? 10U : 0U);
}
ZR_HOST_DEVICE constexpr std::uint32_t topk_digits(int level) {
  return level == 0 ? 2048U : 1024U;
}

ZR_HOST_DEVICE ZR_INLINE std::uint32_t key_of(Lane<float> message) {
  return __builtin_bit_cast(std::uint32_t, message.v) & 0x7fffffffU;
}

ZR_HOST_DEVICE ZR_INLINE std::uint32_t digit_of(std::uint32_t key, int level) {
  return key >> topk_shift(level) & (topk_digits(level) - 1U);
}

template <class W>
ZR_HOST_DEVICE ZR_INLINE W topk_message(W source) {
  return canonical(source);
}

ZR_HOST_DEVICE ZR_INLINE void topk_add_element(float* dst, std::int32_t place, float value, float factor) {
  const auto scaled = Lane<float>{value} * Lane<float>::splat(factor);
  canonical(Lane<float>::load(dst + place) + scaled).store(dst + place);
}

}  // namespace
}  // namespace zeroth::kernels
