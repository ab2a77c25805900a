#include "engine/own_writes.h"

#include <zeroth/base/dtype.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace zeroth {
namespace {

constexpr std::int64_t kCompared = 2048;  // elements that are rounded at a time: they stay in the first cache

void take_whole(const std::byte* param, float* master, std::int64_t n, Kernels& kernels, const Stream& stream) {
  alignas(64) std::array<std::uint16_t, kCompared> rounded;
  for (std::int64_t begin = 0; begin < n; begin += kCompared) {
    const std::int64_t part = std::min(kCompared, n - begin);
    const std::byte* const own = param + array_bytes(begin, DType::kFloat16);
    kernels.convert(rounded.data(), DType::kFloat16, master + begin, DType::kFloat32, part, stream);
    if (std::memcmp(rounded.data(), own, array_bytes(part, DType::kFloat16)) == 0) [[likely]]
      continue;
    const auto* const bits = reinterpret_cast<const std::uint16_t*>(own);
    for (std::int64_t i = 0; i < part; ++i) {
      if (bits[i] != rounded[static_cast<std::size_t>(i)])
        master[begin + i] = std::bit_cast<float>(Float16::widen_bits(bits[i]));
    }
  }
}

void take_upper_half(const std::byte* param, std::int16_t* low, std::int64_t n) {
  constexpr std::uint16_t kMagnitude = 0x7fff;
  constexpr std::uint16_t kInfinity = 0x7f80;
  const auto* const bits = reinterpret_cast<const std::uint16_t*>(param);
  const auto is_odd = [](std::uint16_t high, std::int16_t half) {
    const auto magnitude = static_cast<std::uint16_t>(high & kMagnitude);
    return (magnitude == 0 && half < 0) || (magnitude == kInfinity && half > 0);
  };
  // Looked for first, four at a time: masters that nobody wrote to are not written either. A lane of `x` that is 0 sets
  // its top bit in (x - kOnes) & ~x; one above it may do so too, and an infinity with a lower half of 0 does.
  constexpr std::uint64_t kOnes = 0x0001'0001'0001'0001;
  constexpr std::uint64_t kTops = kOnes << 15U;
  std::uint64_t found = 0;
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    std::uint64_t high = 0;
    std::uint64_t half = 0;
    std::memcpy(&high, bits + i, sizeof high);
    std::memcpy(&half, low + i, sizeof half);
    const std::uint64_t zero = high & ~kTops;
    const std::uint64_t infinity = zero ^ (kOnes * kInfinity);
    found |= ((zero - kOnes) & ~zero & half) | ((infinity - kOnes) & ~infinity & ~half);
  }
  if ((found & kTops) == 0 && i == n) return;
  for (i = 0; i < n; ++i) {
    if (is_odd(bits[i], low[i])) low[i] = 0;
  }
}

}  // namespace

void take_writes(const StateView& view, std::byte* param, std::int64_t element, std::int64_t n, Kernels& kernels,
                 const Stream& stream) {
  if (n <= 0) return;
  if (float* const master = view.master(element)) return take_whole(param, master, n, kernels, stream);
  if (std::int16_t* const low = view.master_low(element)) take_upper_half(param, low, n);
}

}  // namespace zeroth
