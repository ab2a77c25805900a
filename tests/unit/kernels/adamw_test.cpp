#include "kernel_test_support.h"

#include <kernels/adamw/adamw.h>
#include <zeroth/base/error.h>

#include <array>
#include <cmath>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

template <class T>
struct Problem {
  GuardedArray<T> param, exp_avg, exp_avg_sq, grad;

  explicit Problem(std::int64_t n, std::int64_t misalign = 0)
      : param(n, misalign), exp_avg(n, misalign), exp_avg_sq(n, misalign), grad(n, misalign) {}

  AdamWArgs args(const AdamWHyper& hyper) {
    return {.param = param.data(),
            .exp_avg = exp_avg.data(),
            .exp_avg_sq = exp_avg_sq.data(),
            .grad = grad.data(),
            .n = param.size(),
            .dtype = DTypeOf<T>::value,
            .coefficients = adamw_coefficients(hyper)};
  }

  void fill_random(RandomPatterns& random) {
    random.fill(param);
    random.fill(exp_avg);
    random.fill(exp_avg_sq);
    random.fill(grad);
  }

  void fill_moderate(std::uint64_t seed) {
    test::fill_moderate(param, 1.0, seed);
    test::fill_moderate(grad, 4.0, seed + 1);
  }
};

template <class T>
::testing::AssertionResult same_bits(const Problem<T>& want, const Problem<T>& got) {
  for (const auto* name : {"param", "exp_avg", "exp_avg_sq"}) {
    const bool first = std::string_view(name) == "param";
    const bool second = std::string_view(name) == "exp_avg";
    const auto& a = first ? want.param : (second ? want.exp_avg : want.exp_avg_sq);
    const auto& b = first ? got.param : (second ? got.exp_avg : got.exp_avg_sq);
    if (auto result = test::same_bits(a, b); !result) {
      return result << " in " << name;
    }
  }
  return ::testing::AssertionSuccess();
}

AdamWHyper usual_hyper() {
  return {.lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .factor = 1.0 / 6.0, .step = 7};
}

template <class T>
class AdamW : public ::testing::Test {};
using StateTypes = ::testing::Types<float, double>;
TYPED_TEST_SUITE(AdamW, StateTypes);

template <class T>
void expect_same_bits_on_random_patterns(std::int64_t patterns) {
  constexpr std::int64_t kChunk = 140'009;  // ends with a tail
  RandomPatterns random(kSeed);
  std::int64_t done = 0;
  for (int round = 0; done < patterns; ++round, done += kChunk) {
    AdamWHyper hyper = usual_hyper();
    hyper.decoupled = round % 2 == 0;
    hyper.step = 1 + round;
    hyper.eps = round % 3 == 0 ? 0.0 : 1e-8;
    Problem<T> start(kChunk);
    start.fill_random(random);
    Problem<T> want = start;
    adamw_step(want.args(hyper), Isa::kScalar);
    for (const Isa isa : supported_isas()) {
      Problem<T> got = start;
      adamw_step(got.args(hyper), isa);
      ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << ", seed " << kSeed << ", round " << round;
    }
  }
}

TYPED_TEST(AdamW, EveryInstructionSetGivesTheSameBitsOnRandomPatterns) {
  expect_same_bits_on_random_patterns<TypeParam>(2'000'000);
}

/// Of the long tier.
template <class T>
class LongAdamW : public ::testing::Test {};
TYPED_TEST_SUITE(LongAdamW, StateTypes);

TYPED_TEST(LongAdamW, EveryInstructionSetGivesTheSameBitsOnTenMillionRandomPatterns) {
  expect_same_bits_on_random_patterns<TypeParam>(10'000'000);
}

TYPED_TEST(AdamW, EveryTailLengthAndMisalignmentGivesTheSameBits) {
  for (std::int64_t n = 0; n <= 130; ++n) {
    for (const std::int64_t misalign : {0, 1, 3}) {
      Problem<TypeParam> start(n, misalign);
      start.fill_moderate(kSeed + static_cast<std::uint64_t>(n));
      Problem<TypeParam> want = start;
      adamw_step(want.args(usual_hyper()), Isa::kScalar);
      for (const Isa isa : supported_isas()) {
        Problem<TypeParam> got(n, misalign);
        got.fill_moderate(kSeed + static_cast<std::uint64_t>(n));
        adamw_step(got.args(usual_hyper()), isa);
        ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " n " << n << " misalign " << misalign;
      }
    }
  }
}

TYPED_TEST(AdamW, SplittingTheRangeChangesNothing) {
  constexpr std::int64_t kN = 1009;
  for (const Isa isa : supported_isas()) {
    Problem<TypeParam> whole(kN);
    whole.fill_moderate(kSeed);
    Problem<TypeParam> split = whole;
    adamw_step(whole.args(usual_hyper()), isa);
    for (std::int64_t at = 0, length = 0; at < kN; at += length) {
      length = std::min(length + 5, kN - at);
      AdamWArgs args = split.args(usual_hyper());
      args.param = split.param.data() + at;
      args.exp_avg = split.exp_avg.data() + at;
      args.exp_avg_sq = split.exp_avg_sq.data() + at;
      args.grad = split.grad.data() + at;
      args.n = length;
      adamw_step(args, isa);
    }
    EXPECT_TRUE(same_bits(whole, split)) << name_of(isa);
  }
}

TYPED_TEST(AdamW, CallersFloatingPointEnvironmentChangesNothingAndIsRestored) {
  for (const Isa isa : supported_isas()) {
    RandomPatterns random(kSeed);
    Problem<TypeParam> want(4099);
    want.fill_random(random);
    Problem<TypeParam> got = want;
    const AdamWArgs args = got.args(usual_hyper());
    adamw_step(want.args(usual_hyper()), isa);
    bool restored = false;
    {
      const HostileEnvironment hostile;
      adamw_step(args, isa);
      restored = HostileEnvironment::is_current();
    }
    EXPECT_TRUE(restored) << name_of(isa);
    EXPECT_TRUE(same_bits(want, got)) << name_of(isa);
  }
}

// torch.optim.AdamW and Adam (single tensor, no amsgrad), in long double.
struct Oracle {
  long double param, exp_avg = 0, exp_avg_sq = 0;

  void step(const AdamWHyper& h, long double sum) {
    long double grad = sum * static_cast<long double>(h.factor);
    const long double lr = h.lr;
    if (h.decoupled) {
      param *= 1 - lr * static_cast<long double>(h.weight_decay);
    } else {
      grad += static_cast<long double>(h.weight_decay) * param;
    }
    const long double beta1 = h.beta1;
    const long double beta2 = h.beta2;
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad;
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad;
    const long double t = static_cast<long double>(h.step);
    const long double correction1 = 1 - std::pow(beta1, t);
    const long double correction2 = 1 - std::pow(beta2, t);
    param -=
        lr / correction1 * exp_avg / (std::sqrt(exp_avg_sq) / std::sqrt(correction2) + static_cast<long double>(h.eps));
  }
};

// A step rounds the parameter twice (decay, update: 1 ulp of the parameter together) and computes an update
// of about lr with at most 16 roundings that are relative to it; the parameters stay below 2, the learning
// rate is 1e-2. Errors of moments do not grow: beta < 1.
TYPED_TEST(AdamW, FollowsTheFormulaInWiderPrecisionOver50Steps) {
  constexpr std::int64_t kN = 257;
  constexpr int kSteps = 50;
  constexpr double kEps = std::numeric_limits<TypeParam>::epsilon();
  for (const bool decoupled : {true, false}) {
    Problem<TypeParam> problem(kN);
    fill_moderate(problem.param, 1.0, kSeed);
    std::vector<Oracle> oracle;
    for (std::int64_t i = 0; i < kN; ++i) {
      oracle.push_back({.param = static_cast<long double>(problem.param[i])});
    }
    for (int t = 1; t <= kSteps; ++t) {
      const AdamWHyper hyper{
          .lr = 1e-2, .beta2 = 0.95, .weight_decay = 0.1, .decoupled = decoupled, .factor = 0.25, .step = t};
      fill_moderate(problem.grad, 4.0, kSeed + static_cast<std::uint64_t>(t));
      adamw_step(problem.args(hyper), best_isa());
      for (std::int64_t i = 0; i < kN; ++i) {
        oracle[static_cast<std::size_t>(i)].step(hyper, static_cast<long double>(problem.grad[i]));
      }
    }
    for (std::int64_t i = 0; i < kN; ++i) {
      const Oracle& want = oracle[static_cast<std::size_t>(i)];
      const double bound = kSteps * (1.0 * kEps + 1e-2 * 16 * kEps);
      ASSERT_NEAR(static_cast<double>(problem.param[i]), static_cast<double>(want.param), bound) << "element " << i;
      ASSERT_NEAR(static_cast<double>(problem.exp_avg[i]), static_cast<double>(want.exp_avg), 16 * kEps) << i;
      ASSERT_LT(ulp_error(problem.exp_avg_sq[i], want.exp_avg_sq), 24.0) << i;
    }
  }
}

TEST(AdamWCoefficients, BiasCorrectionsAreRoundedOnce) {
  for (const std::int64_t step : {1L, 2L, 3L, 10L, 1000L, 12345L, 1000000L}) {
    for (const double beta : {0.9, 0.95, 0.999}) {
      const AdamWCoefficients c = adamw_coefficients({.lr = 1.0, .beta1 = beta, .beta2 = beta, .step = step});
      const long double correction = 1 - std::pow(static_cast<long double>(beta), static_cast<long double>(step));
      EXPECT_LE(ulp_error(c.step_size, 1 / correction), 1.5) << beta << " ^ " << step;
      EXPECT_LE(ulp_error(c.inv_sqrt_correction2, 1 / std::sqrt(correction)), 2.0) << beta << " ^ " << step;
    }
  }
}

void expect_same_in_halves(Problem<float> start, const AdamWHyper& hyper, std::int64_t misalign, Isa isa) {
  Halves halves(start.param, misalign);
  Problem<float> want = start;
  adamw_step(want.args(hyper), Isa::kScalar);
  AdamWArgs args = start.args(hyper);
  args.param = halves.high.data();
  args.low = halves.low.data();
  adamw_step(args, isa);
  ASSERT_TRUE(halves.high.guards_intact() && halves.low.guards_intact());
  ASSERT_TRUE(test::same_bits(want.param, halves.joined()));
  ASSERT_TRUE(test::same_bits(want.exp_avg, start.exp_avg) && test::same_bits(want.exp_avg_sq, start.exp_avg_sq));
}

TEST(AdamWInHalves, GivesTheBitsOfWholeMastersOnRandomPatterns) {
  constexpr std::int64_t kChunk = 140'009;
  RandomPatterns random(kSeed);
  int round = 0;
  for (std::int64_t done = 0; done < 3'000'000; ++round, done += kChunk) {
    Problem<float> start(kChunk);
    start.fill_random(random);
    AdamWHyper hyper = usual_hyper();
    hyper.decoupled = round % 2 == 0;
    for (const Isa isa : supported_isas()) {
      expect_same_in_halves(start, hyper, 0, isa);
      ASSERT_FALSE(HasFatalFailure()) << name_of(isa) << ", seed " << kSeed << ", round " << round;
    }
  }
}

void expect_same_beside_masters(Problem<float> start, const AdamWHyper& hyper, std::int64_t misalign, Isa isa) {
  GuardedArray<Float16> narrow(start.param.size(), misalign);
  Problem<float> want = start;
  adamw_step(want.args(hyper), Isa::kScalar);
  AdamWArgs args = start.args(hyper);
  args.master = start.param.data();
  args.param = narrow.data();
  adamw_step(args, isa);
  ASSERT_TRUE(narrow.guards_intact());
  ASSERT_TRUE(test::same_bits(want.param, start.param));
  for (std::int64_t i = 0; i < narrow.size(); ++i) ASSERT_EQ(narrow[i], Float16(want.param[i])) << i;
  ASSERT_TRUE(test::same_bits(want.exp_avg, start.exp_avg) && test::same_bits(want.exp_avg_sq, start.exp_avg_sq));
}

TEST(AdamWBesideMasters, RoundsTheMasterToTheFloat16ParameterAndKeepsItsBits) {
  RandomPatterns random(kSeed);
  for (const Isa isa : supported_isas()) {
    for (const std::int64_t n : {0, 1, 7, 8, 15, 16, 17, 130, 140'009}) {
      Problem<float> start(n);
      start.fill_random(random);
      expect_same_beside_masters(start, usual_hyper(), n % 7, isa);
      start.fill_moderate(kSeed + static_cast<std::uint64_t>(n));
      expect_same_beside_masters(start, usual_hyper(), n % 5, isa);
      ASSERT_FALSE(HasFatalFailure()) << name_of(isa) << " n " << n << ", seed " << kSeed;
    }
  }
}

TEST(AdamWInHalves, EveryTailLengthAndMisalignment) {
  for (const Isa isa : supported_isas()) {
    for (std::int64_t n = 0; n <= 130; ++n) {
      Problem<float> start(n);
      start.fill_moderate(kSeed + static_cast<std::uint64_t>(n));
      expect_same_in_halves(start, usual_hyper(), n % 7, isa);
      ASSERT_FALSE(HasFatalFailure()) << name_of(isa) << " n " << n;
    }
  }
}

TYPED_TEST(AdamW, NonFiniteGradientGivesThePositiveQuietNan) {
  for (const Isa isa : supported_isas()) {
    Problem<TypeParam> problem(17);
    problem.fill_moderate(kSeed);
    problem.grad[5] = -std::numeric_limits<TypeParam>::signaling_NaN();
    adamw_step(problem.args(usual_hyper()), isa);
    EXPECT_EQ(bits_of(problem.param[5]), bits_of(std::numeric_limits<TypeParam>::quiet_NaN()));
    EXPECT_EQ(bits_of(problem.exp_avg[5]), bits_of(std::numeric_limits<TypeParam>::quiet_NaN()));
  }
}

// Fixed once on a machine with AVX-512: every other machine and instruction set has to show the same.
TYPED_TEST(AdamW, GoldenBits) {
  constexpr bool kIsFloat = sizeof(TypeParam) == sizeof(float);
  for (const Isa isa : supported_isas()) {
    Problem<TypeParam> problem(1000);
    fill_moderate(problem.param, 1.0, 1);
    for (int t = 1; t <= 10; ++t) {
      fill_moderate(problem.grad, 2.0, 100 + static_cast<std::uint64_t>(t));
      adamw_step(problem.args({.lr = 1e-2, .weight_decay = 0.1, .factor = 1.0 / 3.0, .step = t}), isa);
    }
    std::uint64_t digest = 0xcbf29ce484222325ULL;  // FNV-1a over the bits of the three arrays
    for (const auto* array : {&problem.param, &problem.exp_avg, &problem.exp_avg_sq}) {
      for (std::int64_t i = 0; i < array->size(); ++i) {
        digest = (digest ^ bits_of((*array)[i])) * 0x100000001b3ULL;
      }
    }
    EXPECT_EQ(bits_of(problem.param[0]),
              static_cast<Bits<TypeParam>>(kIsFloat ? 0xbf380579ULL : 0xbfe700aef38abe78ULL));
    EXPECT_EQ(digest, kIsFloat ? 0x2f9550112eb78345ULL : 0x748cd1802501d8cULL) << name_of(isa);
  }
}

TEST(AdamWErrors, RefusesWhatItCannotDo) {
  Problem<float> problem(8);
  const auto refused = [&](auto change) {
    AdamWArgs args = problem.args(usual_hyper());
    change(args);
    EXPECT_THROW(adamw_step(args, Isa::kScalar), Error);
  };
  refused([](AdamWArgs& args) { args.n = -1; });
  refused([](AdamWArgs& args) { args.dtype = DType::kBFloat16; });
  std::int16_t low{};
  refused([&low](AdamWArgs& args) {
    args.dtype = DType::kFloat64;
    args.low = &low;
  });
}

template <class T>
void check_frozen() {
  RandomPatterns random(kSeed + 5);
  AdamWHyper hyper = usual_hyper();
  hyper.variance_step = 3;
  for (const std::int64_t n : {0, 1, 8, 17, 100, 1027}) {
    Problem<T> start(n, 1);
    start.fill_random(random);
    for (std::int64_t i = 0; i < n; ++i) start.exp_avg_sq[i] = i % 3 == 0 ? T{0} : std::fabs(start.exp_avg_sq[i]);
    const AdamWCoefficients c = adamw_coefficients(hyper);
    EXPECT_EQ(c.inv_sqrt_correction2, adamw_coefficients({.beta2 = hyper.beta2, .step = 3}).inv_sqrt_correction2);
    Problem<T> want = start;
    for (std::int64_t i = 0; i < n; ++i) {
      const T v = start.exp_avg_sq[i];
      const T denominator = std::fma(std::sqrt(v), static_cast<T>(c.inv_sqrt_correction2), static_cast<T>(c.eps));
      const T there = v > T{0} ? T{1} : v;  // 0 and NaN as they are
      const T direction = start.exp_avg[i] / denominator * there;
      const T value = std::fma(static_cast<T>(-c.step_size), direction, start.param[i] * static_cast<T>(c.decay));
      want.param[i] = std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
    }
    for (const Isa isa : supported_isas()) {
      Problem<T> got = start;
      AdamWArgs args = got.args(hyper);
      args.grad = nullptr;
      adamw_step(args, isa);
      ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " n " << n;
    }
  }
}

TEST(AdamW, WithoutAGradientMovesParametersAlone) {
  check_frozen<float>();
  check_frozen<double>();
  float value = 0;
  AdamWHyper hyper = usual_hyper();
  hyper.decoupled = false;
  EXPECT_THROW(
      adamw_step(
          {.param = &value, .exp_avg = &value, .exp_avg_sq = &value, .n = 1, .coefficients = adamw_coefficients(hyper)},
          Isa::kScalar),
      Error);
}

}  // namespace
}  // namespace zeroth::kernels
