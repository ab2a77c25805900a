#include <kernels/common/fp_environment.h>
#include <kernels/norm/norm.h>
#include <kernels/norm/norm_variants.h>
#include <zeroth/base/error.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>

namespace zeroth::kernels {
namespace {

__extension__ using Wide = unsigned __int128;

constexpr int kLimbBits = 32;
constexpr std::int64_t kLimbMask = (std::int64_t{1} << kLimbBits) - 1;
constexpr int kMantissaBits = 53;
/// Blocks per call of a variant: their sums stay in registers and L1.
constexpr std::int64_t kBatchBlocks = 64;
/// Batches between two carries: limbs stay far below 2^63.
constexpr std::int64_t kBatchesPerCarry = 4096;

}  // namespace

void NormAccumulator::add_block(double sum) noexcept {
  ++words_[kLimbs + 1];
  const auto bits = std::bit_cast<std::uint64_t>(sum);
  const auto exponent = static_cast<int>((bits >> 52U) & 0x7ffU);
  if (exponent == 0x7ff) {
    ++words_[kLimbs];
    return;
  }
  std::uint64_t mantissa = bits & ((std::uint64_t{1} << 52U) - 1);
  if (exponent > 0) {
    mantissa |= std::uint64_t{1} << 52U;
  }
  const auto position = static_cast<unsigned>(std::max(exponent, 1) - 1);
  const std::size_t limb = position / kLimbBits;
  const unsigned shift = position % kLimbBits;
  const std::uint64_t low = mantissa << shift;
  const std::uint64_t high = shift == 0 ? 0 : mantissa >> (64U - shift);
  words_[limb] += static_cast<std::int64_t>(low) & kLimbMask;
  words_[limb + 1] += static_cast<std::int64_t>(low >> kLimbBits);
  words_[limb + 2] += static_cast<std::int64_t>(high);
}

void NormAccumulator::carry() noexcept {
  for (std::size_t i = 0; i + 1 < kLimbs; ++i) {
    words_[i + 1] += words_[i] >> kLimbBits;
    words_[i] &= kLimbMask;
  }
}

NormAccumulator NormAccumulator::carried() const noexcept {
  NormAccumulator copy = *this;
  copy.carry();
  return copy;
}

void NormAccumulator::add(const void* src, DType dtype, std::int64_t n, Isa isa) {
  const ErrorContext where{.where = "kernels.norm"};
  ZR_CHECK(n >= 0, ErrorCode::kUsage, "negative element count", where);
  ZR_CHECK(is_trained(dtype) && dtype != DType::kFloat16, ErrorCode::kUsage,
           "a norm needs elements of fp64, fp32 or bf16", where);
  detail::require_supported(isa, "norm");
  const detail::FpEnvironment environment;
  const auto kernel =
      detail::select(isa, detail::norm_blocks_scalar, detail::norm_blocks_avx2, detail::norm_blocks_avx512);
  const auto* const bytes = static_cast<const std::byte*>(src);
  const auto element_bytes = static_cast<std::int64_t>(size_of(dtype));
  std::array<double, kBatchBlocks> sums;
  std::int64_t batches = 0;
  for (std::int64_t i = 0; i < n; i += kBatchBlocks * kNormBlock) {
    const std::int64_t count = std::min(n - i, kBatchBlocks * kNormBlock);
    kernel(bytes + i * element_bytes, dtype, count, sums.data());
    const std::int64_t num_blocks = (count + kNormBlock - 1) / kNormBlock;
    for (std::int64_t block = 0; block < num_blocks; ++block) {
      add_block(sums[static_cast<std::size_t>(block)]);
    }
    if (++batches % kBatchesPerCarry == 0) {
      carry();
    }
  }
  carry();
}

void NormAccumulator::add_blocks(std::span<const double> sums) noexcept {
  std::int64_t blocks = 0;
  for (const double sum : sums) {
    add_block(sum);
    if (++blocks % (kBatchesPerCarry * kBatchBlocks) == 0) {
      carry();
    }
  }
  carry();
}

void NormAccumulator::merge(const NormAccumulator& other) noexcept {
  for (std::size_t i = 0; i < words_.size(); ++i) {
    words_[i] += other.words_[i];
  }
  carry();
}

double NormAccumulator::sum_of_squares() const noexcept {
  if (nonfinite_blocks() != 0) {
    return std::numeric_limits<double>::infinity();
  }
  const NormAccumulator number = carried();
  int highest = kLimbs - 1;
  while (highest >= 0 && number.words_[static_cast<std::size_t>(highest)] == 0) {
    --highest;
  }
  if (highest < 0) {
    return 0.0;
  }
  // The three highest limbs hold the 53 bits and the rounding bit; of the rest it matters only whether it is
  // zero.
  const int lowest = std::max(highest - 2, 0);
  Wide top = 0;
  for (int i = highest; i >= lowest; --i) {
    top = (top << static_cast<unsigned>(kLimbBits)) |
          static_cast<std::uint64_t>(number.words_[static_cast<std::size_t>(i)]);
  }
  const bool rest = std::any_of(number.words_.begin(), number.words_.begin() + lowest, [](auto w) { return w != 0; });
  const auto high_half = static_cast<std::uint64_t>(top >> 64U);
  const int length =
      high_half != 0 ? 128 - std::countl_zero(high_half) : 64 - std::countl_zero(static_cast<std::uint64_t>(top));
  const auto dropped = static_cast<unsigned>(std::max(length - kMantissaBits, 0));
  auto mantissa = static_cast<std::uint64_t>(top >> dropped);
  if (dropped > 0) {
    const Wide half = static_cast<Wide>(1) << (dropped - 1);
    const Wide remainder = top & ((half << 1U) - 1);
    const bool up = remainder > half || (remainder == half && (rest || (mantissa & 1U) != 0));
    mantissa += up ? 1 : 0;
  }
  // Put together by bits: arithmetic on denormals would depend on the caller's MXCSR. The hidden bit of the
  // mantissa adds one to the exponent field, a mantissa that was rounded up to 2^53 adds two; below 2^52 the
  // position is zero and the number is denormal.
  const std::uint64_t position = dropped + static_cast<std::uint64_t>(kLimbBits * lowest);
  const std::uint64_t bits = (position << 52U) + mantissa;
  constexpr std::uint64_t kInfinity = 0x7ff0000000000000ULL;
  return std::bit_cast<double>(std::min(bits, kInfinity));
}

double NormAccumulator::l2_norm() const noexcept {
  double sum = sum_of_squares();
  const detail::FpEnvironment environment;
  asm volatile("" : "+x"(sum));  // keeps the square root between the two changes of MXCSR
  double root = std::sqrt(sum);
  asm volatile("" : "+x"(root));
  return root;
}

}  // namespace zeroth::kernels
