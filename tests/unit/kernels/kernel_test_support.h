// What the kernel tests share: instruction sets to compare, random bit patterns, arrays with guards,
// comparison of bits.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>
#include <zeroth/base/error.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace zeroth::kernels::test {

inline constexpr std::uint64_t kSeed = 20240117;

/// Element types of an op's source and result.
template <class In, class Out>
struct Pair {
  using Source = In;
  using Result = Out;
};

/// All that sum_sources takes.
using SumPairs =
    ::testing::Types<Pair<float, float>, Pair<BFloat16, float>, Pair<BFloat16, BFloat16>, Pair<float, BFloat16>,
                     Pair<Float16, float>, Pair<Float16, Float16>, Pair<float, Float16>, Pair<double, double>,
                     Pair<std::int64_t, std::int64_t>, Pair<std::int32_t, std::int32_t>>;
/// All that cast_range takes.
using CastPairs =
    ::testing::Types<Pair<float, BFloat16>, Pair<BFloat16, float>, Pair<float, Float16>, Pair<Float16, float>,
                     Pair<float, double>, Pair<BFloat16, double>, Pair<double, float>>;

template <class T>
T canonical_nan(T value) {
  return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
}

/// Of the Error that a call throws; kInternal if it throws none.
template <class Call>
ErrorCode code_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;
}

/// Every instruction set of this processor, kScalar first.
inline std::vector<Isa> supported_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (is_supported(isa)) {
      isas.push_back(isa);
    }
  }
  return isas;
}

template <class T>
struct BitsOf;
template <>
struct BitsOf<float> {
  using type = std::uint32_t;
};
template <>
struct BitsOf<double> {
  using type = std::uint64_t;
};
template <>
struct BitsOf<BFloat16> {
  using type = std::uint16_t;
};
template <>
struct BitsOf<Float16> {
  using type = std::uint16_t;
};
template <>
struct BitsOf<std::uint8_t> {
  using type = std::uint8_t;
};
template <>
struct BitsOf<std::int16_t> {
  using type = std::uint16_t;
};
template <>
struct BitsOf<std::int32_t> {
  using type = std::uint32_t;
};
template <>
struct BitsOf<std::int64_t> {
  using type = std::uint64_t;
};
template <class T>
using Bits = typename BitsOf<T>::type;

template <class T>
Bits<T> bits_of(T value) {
  return std::bit_cast<Bits<T>>(value);
}

template <class T>
double to_double(T value) {
  if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>) {
    return static_cast<double>(static_cast<float>(value));
  } else {
    return static_cast<double>(value);
  }
}

/// n elements at `misalign` elements past a multiple of 64 bytes, with guard elements on both sides.
template <class T>
class GuardedArray {
 public:
  explicit GuardedArray(std::int64_t n, std::int64_t misalign = 0)
      : n_(n), storage_(static_cast<std::size_t>(n + misalign + 2 * kGuard + kAlign)) {
    std::fill(storage_.begin(), storage_.end(), kPattern);
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data() + kGuard);
    const std::size_t skip = (64 - address % 64) % 64 / sizeof(T);
    first_ = kGuard + static_cast<std::int64_t>(skip) + misalign;
    std::fill_n(data(), n, T{});
  }

  T* data() { return reinterpret_cast<T*>(storage_.data() + first_); }
  const T* data() const { return reinterpret_cast<const T*>(storage_.data() + first_); }
  T& operator[](std::int64_t i) { return data()[i]; }
  const T& operator[](std::int64_t i) const { return data()[i]; }
  std::int64_t size() const { return n_; }

  /// True if nothing outside [0, n) was written.
  bool guards_intact() const {
    const auto is_pattern = [](Bits<T> bits) { return bits == kPattern; };
    return std::all_of(storage_.begin(), storage_.begin() + first_, is_pattern) &&
           std::all_of(storage_.begin() + first_ + n_, storage_.end(), is_pattern);
  }

 private:
  static constexpr std::int64_t kGuard = 32;
  static constexpr std::int64_t kAlign = 64;
  static constexpr Bits<T> kPattern = static_cast<Bits<T>>(0x5a5a5a5a5a5a5a5aULL);

  std::int64_t n_;
  std::int64_t first_ = 0;
  std::vector<Bits<T>> storage_;
};

/// Random bit patterns: half of them any bits, half of them picked where arithmetic is delicate.
class RandomPatterns {
 public:
  explicit RandomPatterns(std::uint64_t seed = kSeed) : engine_(seed) {}

  template <class T>
  T next() {
    using B = Bits<T>;
    const std::uint64_t random = engine_();
    const auto any = static_cast<B>(random);
    const std::uint64_t kind = (random >> 58U) & 31U;
    if constexpr (std::numeric_limits<T>::is_integer) {
      return std::bit_cast<T>(any);
    } else {
      constexpr int kMantissaBits = sizeof(T) == 8 ? 52 : (sizeof(T) == 4 ? 23 : (std::is_same_v<T, Float16> ? 10 : 7));
      constexpr B kSign = static_cast<B>(B{1} << (sizeof(T) * 8 - 1));
      constexpr B kMantissa = static_cast<B>((B{1} << kMantissaBits) - 1);
      constexpr B kExponent = static_cast<B>(~(kSign | kMantissa));
      constexpr B kOne = static_cast<B>((kExponent >> 1U) & kExponent);
      switch (kind) {
        case 0:
          return std::bit_cast<T>(static_cast<B>(any & (kSign | kMantissa)));  // denormals
        case 1:
          return std::bit_cast<T>(static_cast<B>(any & kSign));  // zeros
        case 2:
          return std::bit_cast<T>(static_cast<B>((any & kSign) | kExponent));  // infinities
        case 3:
          return std::bit_cast<T>(static_cast<B>(any | kExponent | 1U));  // NaN, any payload
        case 4:
          return std::bit_cast<T>(static_cast<B>((any & kSign) | (kExponent - 1U)));  // largest finite
        case 5:
          return std::bit_cast<T>(static_cast<B>((any & kSign) | (kMantissa + 1U)));  // smallest normal
        default:
          if (kind < 20) {  // near one: nothing overflows at once
            return std::bit_cast<T>(static_cast<B>((any & (kSign | kMantissa)) | kOne));
          }
          return std::bit_cast<T>(any);
      }
    }
  }

  template <class T>
  void fill(GuardedArray<T>& array) {
    for (std::int64_t i = 0; i < array.size(); ++i) {
      array[i] = next<T>();
    }
  }

  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
};

/// Masters in two halves. Of NaNs there is the canonical one only: others are replaced in `masters`, too.
struct Halves {
  GuardedArray<BFloat16> high;
  GuardedArray<std::int16_t> low;

  explicit Halves(GuardedArray<float>& masters, std::int64_t misalign = 0)
      : high(masters.size(), misalign), low(masters.size(), misalign) {
    for (std::int64_t i = 0; i < masters.size(); ++i) {
      if (std::isnan(masters[i])) {
        masters[i] = std::numeric_limits<float>::quiet_NaN();
      }
      split_master(masters[i], high[i], low[i]);
    }
  }
  GuardedArray<float> joined() const {
    GuardedArray<float> masters(high.size());
    for (std::int64_t i = 0; i < high.size(); ++i) {
      masters[i] = join_master(high[i], low[i]);
    }
    return masters;
  }
};

/// Normal numbers of the given scale, the same on every machine (no library distribution).
template <class T>
void fill_moderate(GuardedArray<T>& array, double scale, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  for (std::int64_t i = 0; i < array.size(); ++i) {
    const auto centred = static_cast<double>(static_cast<std::int64_t>(engine() >> 12U) - (std::int64_t{1} << 51));
    array[i] = static_cast<T>(centred * 0x1p-51 * scale);
  }
}

/// Success, or a failure that names the first element whose bits differ.
template <class T>
::testing::AssertionResult same_bits(const GuardedArray<T>& want, const GuardedArray<T>& got) {
  if (!got.guards_intact()) {
    return ::testing::AssertionFailure() << "wrote outside the range";
  }
  if (std::memcmp(want.data(), got.data(), static_cast<std::size_t>(want.size()) * sizeof(T)) == 0) {
    return ::testing::AssertionSuccess();
  }
  for (std::int64_t i = 0; i < want.size(); ++i) {
    if (bits_of(want[i]) != bits_of(got[i])) {
      return ::testing::AssertionFailure() << "element " << i << " of " << want.size() << ": want 0x" << std::hex
                                           << bits_of(want[i]) << ", got 0x" << bits_of(got[i]);
    }
  }
  return ::testing::AssertionFailure() << "bytes differ";
}

/// Distance of a result from the true value in units of the last place of the true value.
template <class T>
double ulp_error(T got, long double want) {
  if (static_cast<long double>(got) == want) {
    return 0.0;
  }
  const T rounded = std::abs(static_cast<T>(want));
  const T next = std::nextafter(rounded, std::numeric_limits<T>::infinity());
  return static_cast<double>(std::abs(static_cast<long double>(got) - want) / static_cast<long double>(next - rounded));
}

/// MXCSR with flush-to-zero, denormals-are-zero and rounding upwards for the life of the object.
class HostileEnvironment {
 public:
  HostileEnvironment() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(kHostile); }
  ~HostileEnvironment() { __builtin_ia32_ldmxcsr(saved_); }
  HostileEnvironment(const HostileEnvironment&) = delete;
  HostileEnvironment& operator=(const HostileEnvironment&) = delete;

  static bool is_current() { return (__builtin_ia32_stmxcsr() & 0xffc0U) == (kHostile & 0xffc0U); }

 private:
  static constexpr unsigned kHostile = 0x1f80U | 0x8000U | 0x0040U | 0x4000U;
  unsigned saved_;
};

}  // namespace zeroth::kernels::test
