#include "kernel_test_support.h"

#include <kernels/quant/quant.h>
#include <zeroth/base/error.h>

#include <array>
#include <cmath>
#include <vector>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

constexpr std::array<std::int64_t, 10> kSizes{0, 1, 15, 16, 17, 33, 255, 256, 1000, 5003};

constexpr std::array kFormats{CodeFormat::kInt8, CodeFormat::kInt4, CodeFormat::kE4M3, CodeFormat::kE3M0};

/// The value of a code, from the words of quant.h.
double value_of_code(unsigned code, CodeFormat format) {
  const auto of_parts = [&](unsigned mantissa_bits, int bias) {
    const unsigned sign_bit = is_half(format) ? 8 : 128;
    const unsigned magnitude = code & (sign_bit - 1);
    const auto exponent = static_cast<int>(magnitude >> mantissa_bits);
    const double mantissa =
        (magnitude & ((1U << mantissa_bits) - 1)) * std::ldexp(1.0, -static_cast<int>(mantissa_bits));
    const double value = exponent == 0 ? std::ldexp(mantissa, 1 - bias) : std::ldexp(1.0 + mantissa, exponent - bias);
    return (code & sign_bit) != 0 ? -value : value;
  };
  switch (format) {
    case CodeFormat::kInt8:
      return static_cast<std::int8_t>(code);
    case CodeFormat::kInt4:
      return code >= 8 ? static_cast<int>(code) - 16 : static_cast<int>(code);
    case CodeFormat::kE4M3:
      return (code & 0x7fU) == 0x7f ? std::numeric_limits<double>::quiet_NaN() : of_parts(3, 7);
    case CodeFormat::kE3M0:
      return of_parts(0, 3);
  }
  return 0.0;
}

double greatest_of(CodeFormat format) {
  return std::array{127.0, 7.0, 448.0, 16.0}[static_cast<std::size_t>(format)];
}

struct Value {
  double value;
  unsigned code;
};

/// The values that are made, in their order; no zero but +0.
std::vector<Value> values_of(CodeFormat format) {
  std::vector<Value> values;
  for (unsigned code = 0; code < (is_half(format) ? 16U : 256U); ++code) {
    const double value = value_of_code(code, format);
    const bool is_negative_zero = value == 0.0 && code != 0;
    if (std::fabs(value) <= greatest_of(format) && !is_negative_zero) values.push_back({value, code});
  }
  std::sort(values.begin(), values.end(), [](Value a, Value b) { return a.value < b.value; });
  return values;
}

/// The value of `format` that is nearest to x.
Value nearest_of(double x, CodeFormat format) {
  static const std::array kValues{values_of(kFormats[0]), values_of(kFormats[1]), values_of(kFormats[2]),
                                  values_of(kFormats[3])};
  const std::vector<Value>& values = kValues[static_cast<std::size_t>(format)];
  const auto above = std::lower_bound(values.begin(), values.end(), x, [](Value a, double b) { return a.value < b; });
  if (above == values.begin()) return *above;
  if (above == values.end()) return values.back();
  const Value high = *above;
  const Value low = *(above - 1);
  if (x - low.value != high.value - x) return x - low.value < high.value - x ? low : high;
  if (format != CodeFormat::kE3M0) return low.code % 2 == 0 ? low : high;
  if (low.value == 0.0 || high.value == 0.0) return low.value == 0.0 ? low : high;
  return std::fabs(low.value) > std::fabs(high.value) ? low : high;
}

/// The distance of the two values around x: 1 for integers, else 2^-mantissa bits of the power of two below, and around
/// zero as at the smallest normal number.
double widest_step(double x, CodeFormat format) {
  const auto of_parts = [&](double smallest, double digits) {
    return std::exp2(std::max(smallest, std::floor(std::log2(std::fabs(x)))) - digits);
  };
  if (format == CodeFormat::kE4M3) return of_parts(-6, 3);
  return format == CodeFormat::kE3M0 ? of_parts(-2, 0) : 1.0;
}

struct Codes {
  GuardedArray<std::uint8_t> codes;
  GuardedArray<float> scales;
  GuardedArray<float> error;

  Codes(std::int64_t n, std::int64_t block, CodeFormat format, const GuardedArray<float>& from)
      : codes(code_bytes(n, format), 1), scales(code_blocks(n, block)), error(n, 1) {
    std::copy_n(from.data(), n, error.data());
  }
  [[nodiscard]] unsigned code(std::int64_t i, CodeFormat format) const {
    return is_half(format) ? codes[i / 2] >> (i % 2 == 0 ? 0 : 4) & 0xfU : codes[i];
  }
};

/// What quant.h says, in plain arithmetic.
void require_right(const Codes& got, const std::vector<float>& message, const GuardedArray<float>& before,
                   std::int64_t block, CodeFormat format, bool with_error) {
  const auto n = static_cast<std::int64_t>(message.size());
  const auto most = static_cast<float>(greatest_of(format));
  for (std::int64_t begin = 0; begin < n; begin += block) {
    const std::int64_t end = std::min(n, begin + block);
    float greatest = 0.0F;
    bool finite = true;
    for (std::int64_t i = begin; i < end; ++i) {
      const float one = message[static_cast<std::size_t>(i)];
      finite = finite && std::isfinite(one);
      greatest = std::max(greatest, std::fabs(one));
    }
    float scale = greatest / most;
    if (scale < std::numeric_limits<float>::min()) scale = 0.0F;
    const float said = got.scales[begin / block];
    if (!finite) {
      ASSERT_TRUE(std::isnan(said));
    } else {
      ASSERT_EQ(said, scale);
    }
    for (std::int64_t i = begin; i < end; ++i) {
      const float one = message[static_cast<std::size_t>(i)];
      const Value want = !finite || scale == 0.0F ? Value{0.0, 0} : nearest_of(one / scale, format);
      ASSERT_EQ(got.code(i, format), want.code) << "element " << i << " of " << n;
      if (!with_error || !finite) {
        ASSERT_EQ(bits_of(got.error[i]), bits_of(before[i])) << "element " << i;
      } else {
        const float product = static_cast<float>(want.value) * scale;
        ASSERT_EQ(got.error[i], one - product) << "element " << i;
      }
    }
  }
  ASSERT_TRUE(got.codes.guards_intact() && got.scales.guards_intact() && got.error.guards_intact());
}

TEST(Codes, AreThoseOfTheOracleAtEveryWidth) {
  RandomPatterns random(kSeed);
  for (const std::int64_t n : kSizes) {
    for (const std::int64_t block : {16, 48, 256, 4096}) {
      for (const CodeFormat format : kFormats) {
        for (const bool with_error : {false, true}) {
          for (const bool ordinary : {false, true}) {
            GuardedArray<float> src(n, 1);
            GuardedArray<float> before(n);
            random.fill(src);
            random.fill(before);
            for (std::int64_t i = 0; ordinary && i < n; ++i) {
              src[i] = static_cast<float>(random.next<std::int32_t>()) * 0x1p-30F;
              before[i] = static_cast<float>(random.next<std::int32_t>()) * 0x1p-36F;
            }
            std::vector<float> message;
            for (std::int64_t i = 0; i < n; ++i) message.push_back(with_error ? src[i] + before[i] : src[i]);
            for (const Isa isa : supported_isas()) {
              Codes got(n, block, format, before);
              quantize({.codes = got.codes.data(),
                        .scales = got.scales.data(),
                        .src = src.data(),
                        .error = with_error ? got.error.data() : nullptr,
                        .n = n,
                        .block = block,
                        .format = format},
                       isa);
              ASSERT_NO_FATAL_FAILURE(require_right(got, message, before, block, format, with_error))
                  << name_of(isa) << " n " << n << " block " << block;
              // Their values.
              const QuantSource source{got.codes.data(), got.scales.data()};
              GuardedArray<float> values(n, 1);
              dequantize({.dst = values.data(),
                          .sources = &source,
                          .num_sources = 1,
                          .n = n,
                          .block = block,
                          .format = format},
                         isa);
              for (std::int64_t i = 0; i < n; ++i) {
                const float scale = got.scales[i / block];
                if (std::isnan(scale)) {
                  ASSERT_TRUE(std::isnan(values[i]));
                } else {
                  ASSERT_EQ(values[i], static_cast<float>(value_of_code(got.code(i, format), format)) * scale);
                }
              }
              ASSERT_TRUE(values.guards_intact());
            }
          }
        }
      }
    }
  }
}

TEST(Codes, OfSumsAreThoseOfTheTwoCallsOneAfterTheOther) {
  RandomPatterns random(kSeed + 1);
  constexpr int kSources = 5;
  for (const std::int64_t n : kSizes) {
    for (const std::int64_t block : {32, 2048}) {
      for (const CodeFormat format : kFormats) {
        std::vector<GuardedArray<std::uint8_t>> codes;
        std::vector<GuardedArray<float>> scales;
        std::vector<QuantSource> sources;
        codes.reserve(kSources);
        scales.reserve(kSources);
        for (int k = 0; k < kSources; ++k) {
          codes.emplace_back(code_bytes(n, format), k);
          random.fill(codes.back());
          scales.emplace_back(code_blocks(n, block));
          for (std::int64_t i = 0; i < scales.back().size(); ++i)
            scales.back()[i] = static_cast<float>(random.next<std::int32_t>()) * 0x1p-31F;
          sources.push_back({codes.back().data(), scales.back().data()});
        }
        const DequantizeArgs sum{.sources = sources.data(),
                                 .num_sources = kSources,
                                 .n = n,
                                 .block = block,
                                 .format = format,
                                 .factor = 1.0F / kSources};
        GuardedArray<float> zero(n);
        GuardedArray<float> whole(n);
        Codes want(n, block, format, zero);
        DequantizeArgs to_whole = sum;
        to_whole.dst = whole.data();
        dequantize(to_whole, Isa::kScalar);
        quantize({.codes = want.codes.data(),
                  .scales = want.scales.data(),
                  .src = whole.data(),
                  .error = want.error.data(),
                  .n = n,
                  .block = block,
                  .format = format},
                 Isa::kScalar);
        for (const Isa isa : supported_isas()) {
          for (const bool keeps : {false, true}) {
            Codes got(n, block, format, zero);
            GuardedArray<float> kept(n, 1);
            RequantizeArgs args{.sum = sum,
                                .quantize = {.codes = got.codes.data(),
                                             .scales = got.scales.data(),
                                             .error = got.error.data(),
                                             .n = n,
                                             .block = block,
                                             .format = format}};
            args.sum.dst = keeps ? kept.data() : nullptr;
            requantize(args, isa);
            ASSERT_TRUE(same_bits(want.codes, got.codes)) << name_of(isa) << " n " << n;
            ASSERT_TRUE(same_bits(want.scales, got.scales));
            ASSERT_TRUE(same_bits(want.error, got.error));
            if (keeps) {
              ASSERT_TRUE(same_bits(whole, kept));
            }
          }
        }
      }
    }
  }
}

TEST(Codes, AreAllThereAndRoundAtEveryBorder) {
  for (const CodeFormat format : kFormats) {
    const std::vector<Value> values = values_of(format);
    // A block has the greatest value, so that its scale is 1.
    std::vector<float> inputs;
    for (std::size_t k = 0; k + 1 < values.size(); ++k) {
      const auto low = static_cast<float>(values[k].value);
      const auto border = static_cast<float>((values[k].value + values[k + 1].value) / 2);
      ASSERT_EQ(border, (values[k].value + values[k + 1].value) / 2);
      inputs.insert(inputs.end(), {low, std::nextafter(low, 1e9F), std::nextafter(border, -1e9F), border,
                                   std::nextafter(border, 1e9F)});
    }
    for (const float tiny : {0.0F, -0.0F, 1e-45F, -1e-45F, 1e-38F}) inputs.push_back(tiny);
    constexpr std::int64_t kBlock = 16;
    const auto blocks = static_cast<std::int64_t>(inputs.size() + kBlock - 2) / (kBlock - 1);
    GuardedArray<float> src(blocks * kBlock);
    for (std::int64_t i = 0, next = 0; i < src.size(); ++i) {
      const bool is_first = i % kBlock == 0;
      const bool is_there = next < static_cast<std::int64_t>(inputs.size());
      src[i] = is_first || !is_there ? static_cast<float>(greatest_of(format)) : inputs[static_cast<std::size_t>(next)];
      next += is_first ? 0 : 1;
    }
    for (const Isa isa : supported_isas()) {
      Codes got(src.size(), kBlock, format, src);
      quantize({.codes = got.codes.data(),
                .scales = got.scales.data(),
                .src = src.data(),
                .n = src.size(),
                .block = kBlock,
                .format = format},
               isa);
      for (std::int64_t i = 0; i < src.size(); ++i) {
        ASSERT_EQ(got.code(i, format), nearest_of(src[i], format).code) << src[i] << " " << name_of(isa);
      }
    }
    // Every code that can be, those of -0 and NaN as well.
    const std::int64_t codes = is_half(format) ? 16 : 256;
    GuardedArray<std::uint8_t> all(code_bytes(codes, format));
    for (std::int64_t i = 0; i < codes; ++i) {
      all[is_half(format) ? i / 2 : i] |= static_cast<std::uint8_t>(is_half(format) && i % 2 == 1 ? i << 4 : i);
    }
    const std::vector<float> ones(static_cast<std::size_t>(codes / kBlock), 1.0F);
    const QuantSource source{all.data(), ones.data()};
    for (const Isa isa : supported_isas()) {
      GuardedArray<float> got(codes);
      dequantize(
          {.dst = got.data(), .sources = &source, .num_sources = 1, .n = codes, .block = kBlock, .format = format},
          isa);
      for (std::int64_t i = 0; i < codes; ++i) {
        const double want = value_of_code(static_cast<unsigned>(i), format);
        ASSERT_TRUE(std::isnan(want) ? bits_of(got[i]) == 0x7fc00000U : got[i] == want) << i << " " << name_of(isa);
      }
    }
  }
}

// [Note: Quotients without a division]: numbers beside the borders, of scales of all sizes.
TEST(Codes, RoundAtBordersAsADivisionDoesWithAnyScale) {
  constexpr std::int64_t kBlock = 64;
  constexpr std::int64_t kBlocks = 400;
  std::mt19937_64 random(kSeed + 5);
  for (const CodeFormat format : kFormats) {
    const std::vector<Value> values = values_of(format);
    const auto most = static_cast<float>(greatest_of(format));
    GuardedArray<float> src(kBlock * kBlocks);
    for (std::int64_t at = 0; at < kBlocks; ++at) {
      // A third of the exponents are those where divisions begin and end.
      constexpr std::array kExponents{-126, -91, -90, -60, -20, -3, 0, 40, 119, 120};
      const int exponent = kExponents[random() % kExponents.size()];
      const float wish = std::ldexp(1.0F + static_cast<float>(random() % (1U << 23U)) * 0x1p-23F, exponent);
      const float greatest = std::isfinite(wish * most) ? wish * most : std::numeric_limits<float>::max();
      const float scale = greatest / most;
      src[at * kBlock] = greatest;
      for (std::int64_t i = 1; i < kBlock; ++i) {
        const std::size_t k = random() % (values.size() - 1);
        float one = static_cast<float>((values[k].value + values[k + 1].value) / 2) * scale;
        for (std::uint64_t ulps = random() % 4; ulps > 0; --ulps)
          one = std::nextafter(one, random() % 2 == 0 ? -1e38F : 1e38F);
        src[at * kBlock + i] = std::fabs(one) <= greatest ? one : greatest;
      }
    }
    const std::vector<float> message(src.data(), src.data() + src.size());
    for (const bool with_error : {false, true}) {
      GuardedArray<float> zero(src.size());
      for (const Isa isa : supported_isas()) {
        Codes got(src.size(), kBlock, format, zero);
        quantize({.codes = got.codes.data(),
                  .scales = got.scales.data(),
                  .src = src.data(),
                  .error = with_error ? got.error.data() : nullptr,
                  .n = src.size(),
                  .block = kBlock,
                  .format = format},
                 isa);
        ASSERT_NO_FATAL_FAILURE(require_right(got, message, zero, kBlock, format, with_error)) << name_of(isa);
      }
    }
  }
}

/// A sum of more sources than registers hold, with scales of all kinds, long enough for streaming stores or not.
template <class T>
void require_sums_of_single_lanes(std::int64_t n, int num, CodeFormat format, RandomPatterns& random) {
  constexpr std::int64_t kBlock = 1040;  // more than a tile, and no whole number of groups
  std::vector<GuardedArray<std::uint8_t>> codes;
  std::vector<GuardedArray<float>> scales;
  std::vector<QuantSource> sources;
  codes.reserve(static_cast<std::size_t>(num));
  scales.reserve(static_cast<std::size_t>(num));
  for (int k = 0; k < num; ++k) {
    codes.emplace_back(code_bytes(n, format), k);
    random.fill(codes.back());
    scales.emplace_back(code_blocks(n, kBlock));
    for (std::int64_t i = 0; i < scales.back().size(); ++i) {
      scales.back()[i] = static_cast<float>(random.template next<std::int32_t>()) * 0x1p-31F;
      if (i % 5 == k % 5) scales.back()[i] = random.template next<float>();
    }
    sources.push_back({codes.back().data(), scales.back().data()});
  }
  DequantizeArgs args{.dst_dtype = DTypeOf<T>::value,
                      .sources = sources.data(),
                      .num_sources = num,
                      .n = n,
                      .block = kBlock,
                      .format = format,
                      .factor = 0.3F};
  GuardedArray<T> want(n);
  args.dst = want.data();
  dequantize(args, Isa::kScalar);
  for (const Isa isa : supported_isas()) {
    for (const std::int64_t misalign : {0, 1}) {
      GuardedArray<T> got(n, misalign);
      args.dst = got.data();
      dequantize(args, isa);
      ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " n " << n << " sources " << num;
      ASSERT_TRUE(got.guards_intact());
    }
  }
}

TEST(Codes, AreSummedToTheBitsOfSingleLanes) {
  RandomPatterns random(kSeed + 6);
  for (const CodeFormat format : kFormats) {
    for (const int num : {1, 8, 9, 19}) {
      ASSERT_NO_FATAL_FAILURE(require_sums_of_single_lanes<float>(3001, num, format, random));
      ASSERT_NO_FATAL_FAILURE(require_sums_of_single_lanes<BFloat16>(3001, num, format, random));
    }
    ASSERT_NO_FATAL_FAILURE(require_sums_of_single_lanes<float>((std::int64_t{1} << 16) + 77, 2, format, random));
    ASSERT_NO_FATAL_FAILURE(require_sums_of_single_lanes<Float16>((std::int64_t{1} << 17) + 77, 2, format, random));
  }
}

TEST(Codes, AreWithinHalfAStepOfTheFormat) {
  constexpr std::int64_t kElements = 4096;
  for (const CodeFormat format : kFormats) {
    GuardedArray<float> src(kElements);
    fill_moderate(src, 3.0, kSeed + 3);
    GuardedArray<float> left(kElements);
    GuardedArray<std::uint8_t> codes(code_bytes(kElements, format));
    GuardedArray<float> scales(kElements / 256);
    quantize({.codes = codes.data(),
              .scales = scales.data(),
              .src = src.data(),
              .error = left.data(),
              .n = kElements,
              .format = format},
             best_isa());
    for (std::int64_t i = 0; i < kElements; ++i) {
      const double scale = scales[i / 256];
      const double step = widest_step(src[i] / scale, format);
      ASSERT_LE(std::fabs(static_cast<double>(left[i])), step * scale / 2 * (1 + 1e-6)) << i << " of " << src[i];
    }
  }
}

TEST(Codes, OfStochasticRoundingHaveTheRightMeanAndDoNotDependOnTheSplit) {
  constexpr std::int64_t kElements = 64;
  constexpr int kDraws = 4000;
  GuardedArray<float> src(kElements);
  for (std::int64_t i = 0; i < kElements; ++i) src[i] = std::sin(static_cast<float>(i) * 0.7F);
  for (const CodeFormat format : kFormats) {
    std::vector<double> sum(kElements, 0.0);
    std::vector<double> steps(kElements, 0.0);
    for (std::uint32_t seed = 0; seed < kDraws; ++seed) {
      GuardedArray<std::uint8_t> codes(code_bytes(kElements, format));
      GuardedArray<float> scales(1);
      QuantizeArgs args{.codes = codes.data(),
                        .scales = scales.data(),
                        .src = src.data(),
                        .n = kElements,
                        .block = kElements,
                        .format = format,
                        .stochastic = {.enabled = true, .seed = seed * 2654435761U, .first = 1000}};
      quantize(args, best_isa());
      GuardedArray<float> values(kElements);
      const QuantSource source{codes.data(), scales.data()};
      dequantize({.dst = values.data(),
                  .sources = &source,
                  .num_sources = 1,
                  .n = kElements,
                  .block = kElements,
                  .format = format},
                 best_isa());
      for (std::int64_t i = 0; i < kElements; ++i) {
        steps[static_cast<std::size_t>(i)] = widest_step(src[i] / scales[0], format) * scales[0];
        ASSERT_LE(std::fabs(values[i] - src[i]), steps[static_cast<std::size_t>(i)] * 1.00001);
        sum[static_cast<std::size_t>(i)] += values[i];
      }
    }
    for (std::int64_t i = 0; i < kElements; ++i) {
      // A draw is off by less than a step, with a variance of at most step^2 / 4: five standard deviations.
      EXPECT_NEAR(sum[static_cast<std::size_t>(i)] / kDraws, src[i],
                  5 * steps[static_cast<std::size_t>(i)] / 2 / std::sqrt(kDraws))
          << i;
    }
  }
  // Two calls, at a block boundary, with the number of the first element.
  GuardedArray<std::uint8_t> whole(kElements);
  GuardedArray<std::uint8_t> parts(kElements);
  GuardedArray<float> scales(2);
  QuantizeArgs args{.codes = whole.data(),
                    .scales = scales.data(),
                    .src = src.data(),
                    .n = kElements,
                    .block = kElements / 2,
                    .stochastic = {.enabled = true, .seed = 5, .first = 77}};
  quantize(args, best_isa());
  args.n = kElements / 2;
  args.codes = parts.data();
  quantize(args, best_isa());
  args.codes += args.n;
  args.src = src.data() + args.n;
  args.stochastic.first += static_cast<std::uint32_t>(args.n);
  quantize(args, best_isa());
  EXPECT_TRUE(same_bits(whole, parts));
}

TEST(Codes, ThatCannotBeAreRefused) {
  const Isa isa = best_isa();
  EXPECT_EQ(code_of([&] { quantize({.n = -1}, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { quantize({.n = 1, .block = 24}, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { quantize({.src_dtype = DType::kFloat64, .n = 1}, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { dequantize({.n = 1}, isa); }), ErrorCode::kUsage);
  const QuantSource source{};
  const DequantizeArgs sum{.sources = &source, .num_sources = 1, .n = 1, .block = 8192};
  EXPECT_EQ(code_of([&] { requantize({.sum = sum, .quantize = {.n = 1, .block = 8192}}, isa); }), ErrorCode::kUsage);
}

}  // namespace
}  // namespace zeroth::kernels
