// The arithmetic of quant.h for one vector (or lane) of elements.
#pragma once

#include <kernels/common/lane.h>
#include <kernels/quant/quant.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Elements of a block are a multiple of this.
constexpr std::int64_t kCodeGroup = 16;
/// Elements of a block that is summed and packed at once.
constexpr std::int64_t kMostRequantized = 4096;

constexpr bool has_codes(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

template <class ElementType>
struct CodedType {
  using Element = ElementType;
};

/// Calls body(CodedType<...>{}) for a dtype that has_codes().
template <class Body>
ZR_INLINE void with_coded_type(DType dtype, const Body& body) {
  if (dtype == DType::kBFloat16) return body(CodedType<BFloat16>{});
  if (dtype == DType::kFloat16) return body(CodedType<Float16>{});
  body(CodedType<float>{});
}

/// Integers.
template <int kGreatest, bool kIsHalf>
struct IntegerCodes {
  static constexpr float kMost = static_cast<float>(kGreatest);
  static constexpr bool kHalf = kIsHalf;
  static constexpr bool kInteger = true;

  template <class W>
  ZR_HOST_DEVICE static ZR_INLINE W rounded(W x) {
    return x.nearest() + W::splat(0.0F);  // no -0
  }
  template <class W>
  ZR_HOST_DEVICE static ZR_INLINE W step_at(W /*x*/) {
    return W::splat(1.0F);
  }
  template <class W>
  ZR_HOST_DEVICE static ZR_INLINE void store(W value, std::int8_t* p) {
    value.store(p);
  }
  template <class W>
  ZR_HOST_DEVICE static ZR_INLINE W load(const std::int8_t* p) {
    return W::load(p);
  }
};

/// Floats. Times 2^(kBias - 127) the parts of a value are those of a float32, of subnormal numbers as well.
template <unsigned kExponent, unsigned kMantissa, int kBias, int kGreatest>
struct FloatCodes {
  static constexpr float kMost = static_cast<float>(kGreatest);
  static constexpr bool kHalf = kExponent + kMantissa == 3;
  static constexpr bool kInteger = false;
  static constexpr int kMagnitudeBits = kExponent + kMantissa;
  static constexpr int kMantissaBits = kMantissa;

  /// 2^k.
  ZR_HOST_DEVICE static constexpr float power_of_two(int k) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(k + 127) << 23U);
  }
  static constexpr float kSmallestNormal = power_of_two(1 - kBias);
  static constexpr float kToParts = power_of_two(kBias - 127);
  static constexpr float kFromParts = power_of_two(127 - kBias);

  /// The power of two whose binade has the same steps as the numbers around x.
  template <class W>
  ZR_HOST_DEVICE static ZR_INLINE W binade_of(W x) {
    return W::greater(x.power(), W::splat(kSmallestNormal));
  }
  /// By a sum whose last place is a step.
  template <class W>
  ZR_HOST_DEVICE static ZR_INLINE W rounded(W x) {
    const W shift = binade_of(x) * W::splat(1.5F * power_of_two(23 - static_cast<int>(kMantissa)));
    return (x + shift) - shift;
  }
  template <class W>
  ZR_HOST_DEVICE static ZR_INLINE W step_at(W x) {
    return binade_of(x) * W::splat(power_of_two(-static_cast<int>(kMantissa)));
  }
  template <class W>
  ZR_HOST_DEVICE static ZR_INLINE void store(W value, std::int8_t* p) {
    (value * W::splat(kToParts)).template store_parts<kExponent, kMantissa>(p);
  }
  template <class W>
  ZR_HOST_DEVICE static ZR_INLINE W load(const std::int8_t* p) {
    const W value = W::template load_parts<kExponent, kMantissa>(p) * W::splat(kFromParts);
    if constexpr (kHalf) return value;
    return value.nan_above(kMost);
  }
};

/// Calls body(codes) with the type of a format.
template <class Body>
ZR_INLINE void with_codes(CodeFormat format, const Body& body) {
  switch (format) {
    case CodeFormat::kInt4:
      return body(IntegerCodes<7, true>{});
    case CodeFormat::kE4M3:
      return body(FloatCodes<4, 3, 7, 448>{});
    case CodeFormat::kE3M0:
      return body(FloatCodes<3, 0, 3, 16>{});
    case CodeFormat::kInt8:
      break;
  }
  body(IntegerCodes<127, false>{});
}

/// s of a block, of its greatest magnitude().
ZR_HOST_DEVICE ZR_INLINE float scale_of(float greatest, float most) {
  if (!(greatest < __builtin_inff())) return __builtin_bit_cast(float, kQuietNan32);
  const float scale = greatest / most;
  return scale < 0x1p-126F ? 0.0F : scale;
}

/// What messages of a block are divided by: all of a block whose scale is 0 are rounded to 0.
ZR_HOST_DEVICE ZR_INLINE float divisor_of(float scale) {
  return scale > 0.0F ? scale : 1.0F;
}

/// q of a finite message.
template <class Codes, class W>
ZR_HOST_DEVICE ZR_INLINE W value_of(W message, W divisor) {
  return Codes::rounded(message / divisor);
}

/// The same, rounded down after `uniform` of a step was added, inside of [-Q, Q].
template <class Codes, class W>
ZR_HOST_DEVICE ZR_INLINE W stochastic_value_of(W message, W divisor, W uniform) {
  const W exact = message / divisor;
  const W step = Codes::step_at(exact);
  return ((exact / step + uniform).floor() * step).clamped(Codes::kMost) + W::splat(0.0F);
}

template <class W>
ZR_HOST_DEVICE ZR_INLINE W error_of(W message, W value, W scale) {
  return message - value * scale;
}

/// Two codes of 4 bits.
ZR_HOST_DEVICE ZR_INLINE std::uint8_t pair_of(int low, int high) {
  return static_cast<std::uint8_t>((static_cast<unsigned>(low) & 0xfU) | (static_cast<unsigned>(high) & 0xfU) << 4U);
}
/// The code of element `i` in a byte of two.
ZR_HOST_DEVICE ZR_INLINE std::int8_t half_of(std::uint8_t pair, std::int64_t i) {
  const unsigned half = static_cast<unsigned>(pair) >> (i % 2 == 0 ? 0U : 4U) & 0xfU;
  return static_cast<std::int8_t>(static_cast<int>(half ^ 8U) - 8);
}

}  // namespace
}  // namespace zeroth::kernels
