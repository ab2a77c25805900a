// Random numbers as pure functions of a key: no generator state, so nothing that is drawn depends on what was
// drawn before, on the ZeRO stage or on which rank holds a parameter.
#pragma once

#include <cstdint>
#include <span>

namespace gpt {

/// 64 well mixed bits of a 64-bit counter (the finalizer of SplitMix64).
/// Ref: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, section 5.
[[nodiscard]] constexpr std::uint64_t mix64(std::uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31U);
}

/// A key of an ordered list of numbers: `key_of(seed, step, rank)` and `key_of(seed, rank, step)` differ.
template <class... Numbers>
[[nodiscard]] constexpr std::uint64_t key_of(std::uint64_t first, Numbers... rest) noexcept {
  std::uint64_t key = mix64(first);
  ((key = mix64(key ^ static_cast<std::uint64_t>(rest))), ...);
  return key;
}

/// A double in [0, 1) from the upper 53 bits.
[[nodiscard]] constexpr double unit_interval(std::uint64_t bits) noexcept {
  return static_cast<double>(bits >> 11U) * 0x1.0p-53;
}

/// Fills `values` with independent uniform numbers of mean 0 and standard deviation `deviation`, a function
/// of `key` and the index only. Uniform instead of normal: the same variance at a tenth of the time, and
/// start-up time is seen.
/// @tparam T float or double; both get the same values (those of float).
template <class T>
void fill_scaled_uniform(std::span<T> values, std::uint64_t key, double deviation) {
  constexpr double kSqrt3 = 1.7320508075688772;
  // Two numbers of 24 bits from one mix; 2 * u - 1 is exact in float, so both widths agree.
  const float scale = static_cast<float>(deviation * kSqrt3) * 0x1.0p-23F;
  const auto number = [scale](std::uint64_t bits24) {
    return static_cast<T>(static_cast<float>(static_cast<std::int32_t>(bits24) - (1 << 23)) * scale);
  };
  std::size_t i = 0;
  for (; i + 1 < values.size(); i += 2) {
    const std::uint64_t bits = mix64(key + i);
    values[i] = number(bits >> 40U);
    values[i + 1] = number((bits >> 16U) & 0xffffffU);
  }
  if (i < values.size()) {
    values[i] = number(mix64(key + i) >> 40U);
  }
}

}  // namespace gpt
