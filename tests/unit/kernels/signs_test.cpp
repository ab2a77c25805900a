#include "kernel_test_support.h"

#include <kernels/norm/norm.h>
#include <kernels/signs/signs.h>
#include <zeroth/base/error.h>

#include <array>
#include <cmath>
#include <vector>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

template <class T>
class Signs : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Signs, Types);

constexpr std::array<std::int64_t, 14> kSizes{0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 64, 1000, 1023, 4099};

/// What signs.h says, element by element.
template <class T>
struct Oracle {
  static T message(T error, const T* momentum, T grad, T momentum_factor, T grad_factor) {
    T fresh = grad_factor * grad;
    if (momentum != nullptr) fresh = std::fma(momentum_factor, *momentum, fresh);
    return canonical_nan(static_cast<T>(error + fresh));
  }
  static T packed(T message, T scale) { return message < T(0) ? -scale : scale; }
};

TYPED_TEST(Signs, AreThoseOfTheOracleAtEveryWidth) {
  using T = TypeParam;
  RandomPatterns random(kSeed);
  for (const std::int64_t n : kSizes) {
    for (const std::int64_t misalign : {0, 1}) {
      GuardedArray<T> error(n, misalign);
      GuardedArray<T> momentum(n, misalign);
      GuardedArray<T> grad(n, misalign);
      random.fill(error);
      random.fill(momentum);
      random.fill(grad);
      const double scale = 0.7;
      for (const bool with_momentum : {false, true}) {
        GuardedArray<T> message(n);
        GuardedArray<T> left(n);
        std::vector<bool> positive(static_cast<std::size_t>(n));
        for (std::int64_t i = 0; i < n; ++i) {
          message[i] = Oracle<T>::message(error[i], with_momentum ? &momentum[i] : nullptr, grad[i],
                                          static_cast<T>(0.9), static_cast<T>(0.1));
          positive[static_cast<std::size_t>(i)] = !(message[i] < T(0));
          left[i] = canonical_nan(static_cast<T>(message[i] - Oracle<T>::packed(message[i], static_cast<T>(scale))));
        }
        for (const Isa isa : supported_isas()) {
          GuardedArray<T> got(n, misalign);
          std::copy_n(error.data(), n, got.data());
          sign_message({.error = got.data(),
                        .momentum = with_momentum ? momentum.data() : nullptr,
                        .grad = grad.data(),
                        .grad_dtype = DTypeOf<T>::value,
                        .n = n,
                        .dtype = DTypeOf<T>::value,
                        .momentum_factor = 0.9,
                        .grad_factor = 0.1},
                       isa);
          ASSERT_TRUE(same_bits(message, got)) << name_of(isa) << " n " << n;
          GuardedArray<std::uint8_t> bits(sign_bytes(n), misalign);
          std::fill_n(bits.data(), bits.size(), std::uint8_t{0xff});
          sign_pack({.error = got.data(), .bits = bits.data(), .n = n, .dtype = DTypeOf<T>::value, .scale = scale},
                    isa);
          ASSERT_TRUE(same_bits(left, got)) << name_of(isa) << " n " << n;
          ASSERT_TRUE(bits.guards_intact());
          for (std::int64_t i = 0; i < 8 * bits.size(); ++i) {
            const bool set = (bits[i / 8] >> static_cast<unsigned>(i % 8) & 1U) != 0;
            ASSERT_EQ(set, i < n && positive[static_cast<std::size_t>(i)]) << name_of(isa) << " element " << i;
          }
          // One source and factor 1 are q.
          const SignSource source{bits.data(), scale};
          GuardedArray<T> packed(n, misalign);
          sign_sum({.dst = packed.data(), .sources = &source, .num_sources = 1, .n = n, .dtype = DTypeOf<T>::value},
                   isa);
          for (std::int64_t i = 0; i < n; ++i) {
            ASSERT_EQ(packed[i],
                      positive[static_cast<std::size_t>(i)] ? static_cast<T>(scale) : -static_cast<T>(scale));
          }
          ASSERT_TRUE(packed.guards_intact());
        }
      }
    }
  }
}

TYPED_TEST(Signs, AreSummedInTheOrderOfTheirSources) {
  using T = TypeParam;
  RandomPatterns random(kSeed + 1);
  for (const std::int64_t n : kSizes) {
    for (const int num : {1, 2, 5}) {
      std::vector<GuardedArray<std::uint8_t>> bits;
      std::vector<SignSource> sources;
      bits.reserve(static_cast<std::size_t>(num));
      for (int k = 0; k < num; ++k) {
        bits.emplace_back(sign_bytes(n), k);
        random.fill(bits.back());
        sources.push_back({bits.back().data(), std::exp(k * 1.7)});  // rounded to T
      }
      GuardedArray<T> error(n, 1);
      random.fill(error);
      for (const bool with_error : {false, true}) {
        GuardedArray<T> want(n);
        for (std::int64_t i = 0; i < n; ++i) {
          T sum{};
          for (int k = 0; k < num; ++k) {
            const auto scale = static_cast<T>(sources[static_cast<std::size_t>(k)].scale);
            const bool set = (bits[static_cast<std::size_t>(k)][i / 8] >> static_cast<unsigned>(i % 8) & 1U) != 0;
            const T value = set ? scale : -scale;
            sum = k == 0 ? value : sum + value;
          }
          sum = sum * static_cast<T>(1.0 / num);
          want[i] = canonical_nan(with_error ? static_cast<T>(sum + error[i]) : sum);
        }
        for (const Isa isa : supported_isas()) {
          for (const bool in_place : {false, true}) {
            GuardedArray<T> got(n, 1);
            if (in_place) std::copy_n(error.data(), n, got.data());
            sign_sum({.dst = got.data(),
                      .error = !with_error ? nullptr
                               : in_place  ? got.data()
                                           : error.data(),
                      .sources = sources.data(),
                      .num_sources = num,
                      .n = n,
                      .dtype = DTypeOf<T>::value,
                      .factor = 1.0 / num},
                     isa);
            ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " n " << n << " sources " << num;
          }
        }
      }
    }
  }
}

TYPED_TEST(Signs, OfManySourcesAndElementsAreSummedToTheBitsOfSingleLanes) {
  using T = TypeParam;
  constexpr std::int64_t kElements = (std::int64_t{1} << 16) + 77;  // long enough for streaming stores
  RandomPatterns random(kSeed + 4);
  for (const int num : {3, 18}) {
    std::vector<GuardedArray<std::uint8_t>> bits;
    std::vector<SignSource> sources;
    bits.reserve(static_cast<std::size_t>(num));
    for (int k = 0; k < num; ++k) {
      bits.emplace_back(sign_bytes(kElements), k);
      random.fill(bits.back());
      sources.push_back({bits.back().data(), std::exp(k * 0.7)});
    }
    for (const std::int64_t misalign : {0, 1, 8}) {
      GuardedArray<T> error(kElements, misalign);
      random.fill(error);
      SignSumArgs args{.sources = sources.data(), .num_sources = num, .n = kElements, .dtype = DTypeOf<T>::value};
      for (const bool with_error : {false, true}) {
        args.error = with_error ? error.data() : nullptr;
        GuardedArray<T> want(kElements);
        args.dst = want.data();
        sign_sum(args, Isa::kScalar);
        for (const Isa isa : supported_isas()) {
          GuardedArray<T> got(kElements, misalign);
          args.dst = got.data();
          sign_sum(args, isa);
          ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " sources " << num << " misaligned by " << misalign;
          ASSERT_TRUE(got.guards_intact());
        }
      }
    }
  }
}

TEST(SignMessages, TakeGradientsOf16Bits) {
  RandomPatterns random(kSeed + 2);
  const auto check = [&random](auto of_type) {
    using In = decltype(of_type);
    for (const std::int64_t n : kSizes) {
      GuardedArray<In> grad(n, 1);
      random.fill(grad);
      GuardedArray<float> wide(n);
      for (std::int64_t i = 0; i < n; ++i) wide[i] = static_cast<float>(grad[i]);
      GuardedArray<float> start(n);
      random.fill(start);
      SignMessageArgs args{.n = n, .momentum_factor = 0.0, .grad_factor = 3.0};
      for (const Isa isa : supported_isas()) {
        GuardedArray<float> want(n);
        GuardedArray<float> got(n);
        std::copy_n(start.data(), n, want.data());
        std::copy_n(start.data(), n, got.data());
        args.error = want.data();
        args.grad = wide.data();
        args.grad_dtype = DType::kFloat32;
        sign_message(args, isa);
        args.error = got.data();
        args.grad = grad.data();
        args.grad_dtype = DTypeOf<In>::value;
        sign_message(args, isa);
        ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " n " << n;
      }
    }
  };
  check(BFloat16{});
  check(Float16{});
}

/// The 1-bit all-reduce of ranks whose gradients are noise around one mean, step after step; the relative error of
/// everything that it has delivered so far. Tang et al., algorithm 1.
double error_of_compressed_sums(int steps, bool with_errors) {
  constexpr int kRanks = 4;
  constexpr std::int64_t kElements = 320;
  constexpr std::int64_t kChunk = kElements / kRanks;
  std::mt19937_64 random(kSeed);
  std::normal_distribution<float> normal;
  std::vector<float> mean(kElements);
  for (float& one : mean) one = normal(random);
  std::vector<std::vector<float>> worker(kRanks, std::vector<float>(kElements, 0.0F));
  std::vector<float> server(kElements, 0.0F);
  std::vector<double> delivered(kElements, 0.0);
  std::vector<double> wanted(kElements, 0.0);
  const Isa isa = best_isa();
  const auto scale_of = [isa](const float* values, std::int64_t n) {
    NormAccumulator norm;
    norm.add(values, DType::kFloat32, n, isa);
    return std::sqrt(norm.sum_of_squares() / static_cast<double>(n));
  };
  for (int step = 0; step < steps; ++step) {
    std::vector<std::vector<std::uint8_t>> bits(kRanks, std::vector<std::uint8_t>(sign_bytes(kElements)));
    std::vector<double> scales;
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      std::vector<float> grad(kElements);
      for (std::size_t i = 0; i < grad.size(); ++i) {
        grad[i] = mean[i] + normal(random);
        wanted[i] += static_cast<double>(grad[i]) / kRanks;
      }
      std::vector<float>& error = worker[rank];
      if (!with_errors) std::ranges::fill(error, 0.0F);
      sign_message({.error = error.data(), .grad = grad.data(), .n = kElements}, isa);
      scales.push_back(scale_of(error.data(), kElements));
      sign_pack({.error = error.data(), .bits = bits[rank].data(), .n = kElements, .scale = scales.back()}, isa);
    }
    if (!with_errors) std::ranges::fill(server, 0.0F);
    for (std::int64_t chunk = 0; chunk < kRanks; ++chunk) {
      float* const own = server.data() + chunk * kChunk;
      std::vector<SignSource> sources;
      for (std::size_t rank = 0; rank < kRanks; ++rank)
        sources.push_back({bits[rank].data() + sign_bytes(chunk * kChunk), scales[rank]});
      sign_sum({.dst = own,
                .error = own,
                .sources = sources.data(),
                .num_sources = kRanks,
                .n = kChunk,
                .factor = 1.0 / kRanks},
               isa);
      std::vector<std::uint8_t> packed(sign_bytes(kChunk));
      const double scale = scale_of(own, kChunk);
      sign_pack({.error = own, .bits = packed.data(), .n = kChunk, .scale = scale}, isa);
      std::vector<float> out(kChunk);
      const SignSource source{packed.data(), scale};
      sign_sum({.dst = out.data(), .sources = &source, .num_sources = 1, .n = kChunk}, isa);
      for (std::int64_t i = 0; i < kChunk; ++i)
        delivered[static_cast<std::size_t>(chunk * kChunk + i)] += out[static_cast<std::size_t>(i)];
    }
  }
  double off = 0.0;
  double size = 0.0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    off += (delivered[i] - wanted[i]) * (delivered[i] - wanted[i]);
    size += wanted[i] * wanted[i];
  }
  return std::sqrt(off / size);
}

TEST(SignReduction, LosesNothingOverTimeBecauseErrorsAreFedBack) {
  const double early = error_of_compressed_sums(50, true);
  const double late = error_of_compressed_sums(800, true);
  EXPECT_LT(early, 0.1);
  EXPECT_LT(late, early / 5);  // about 1 / steps
  // Without error feedback it stays wrong.
  EXPECT_GT(error_of_compressed_sums(800, false), 0.15);
}

TEST(SignArguments, ThatCannotBeAreRefused) {
  float value = 0;
  std::uint8_t bits = 0;
  const SignSource source{&bits, 1.0};
  const Isa isa = best_isa();
  EXPECT_EQ(code_of([&] { sign_message({.error = &value, .grad = &value, .n = -1}, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(
      code_of([&] { sign_message({.error = &value, .grad = &value, .grad_dtype = DType::kFloat64, .n = 1}, isa); }),
      ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { sign_message({.error = &value, .grad = &value, .n = 1, .dtype = DType::kBFloat16}, isa); }),
            ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { sign_pack({.error = &value, .bits = &bits, .n = 1, .dtype = DType::kInt32}, isa); }),
            ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { sign_sum({.dst = &value, .sources = &source, .num_sources = 0, .n = 1}, isa); }),
            ErrorCode::kUsage);
}

}  // namespace
}  // namespace zeroth::kernels
