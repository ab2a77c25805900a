#include "kernel_test_support.h"

#include <kernels/sgd/sgd.h>
#include <zeroth/base/error.h>

#include <cmath>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

template <class T>
struct Problem {
  GuardedArray<T> param, momentum, grad;

  explicit Problem(std::int64_t n, std::int64_t misalign = 0)
      : param(n, misalign), momentum(n, misalign), grad(n, misalign) {}

  SgdArgs args(const SgdHyper& hyper, std::int64_t at = 0, std::int64_t n = -1) {
    return {.param = param.data() + at,
            .momentum = momentum.data() + at,
            .grad = grad.data() + at,
            .n = n < 0 ? param.size() : n,
            .dtype = DTypeOf<T>::value,
            .hyper = hyper};
  }
};

template <class T>
::testing::AssertionResult same_bits(const Problem<T>& want, const Problem<T>& got) {
  if (auto result = test::same_bits(want.param, got.param); !result) {
    return result << " in param";
  }
  return test::same_bits(want.momentum, got.momentum) << " (momentum)";
}

std::vector<SgdHyper> hypers() {
  return {{.lr = 0.1, .factor = 0.25},
          {.lr = 0.1, .weight_decay = 0.01, .factor = 1.0 / 3.0},
          {.lr = 0.1, .momentum = 0.9, .dampening = 0.1, .weight_decay = 0.01, .factor = 0.5},
          {.lr = 0.1, .momentum = 0.9, .dampening = 0.1, .factor = 0.5, .first_step = true},
          {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true, .factor = 0.5},
          {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true, .factor = 0.5, .first_step = true}};
}

template <class T>
class Sgd : public ::testing::Test {};
using StateTypes = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Sgd, StateTypes);

TYPED_TEST(Sgd, EveryInstructionSetGivesTheSameBitsOnRandomPatterns) {
  constexpr std::int64_t kChunk = 65521;
  RandomPatterns random(kSeed);
  std::size_t round = 0;
  for (std::int64_t done = 0; done < 10'000'000; ++round, done += kChunk) {
    const SgdHyper hyper = hypers()[round % hypers().size()];
    Problem<TypeParam> start(kChunk);
    random.fill(start.param);
    random.fill(start.momentum);
    random.fill(start.grad);
    Problem<TypeParam> want = start;
    sgd_step(want.args(hyper), Isa::kScalar);
    for (const Isa isa : supported_isas()) {
      Problem<TypeParam> got = start;
      sgd_step(got.args(hyper), isa);
      ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << ", seed " << kSeed << ", round " << round;
    }
  }
}

TYPED_TEST(Sgd, EveryTailLengthMisalignmentAndSplitGivesTheSameBits) {
  for (const SgdHyper& hyper : hypers()) {
    for (std::int64_t n = 0; n <= 130; ++n) {
      for (const std::int64_t misalign : {0, 3}) {
        const auto fresh = [&] {
          Problem<TypeParam> problem(n, misalign);
          fill_moderate(problem.param, 1.0, kSeed);
          fill_moderate(problem.momentum, 1.0, kSeed + 1);
          fill_moderate(problem.grad, 1.0, kSeed + 2);
          return problem;
        };
        Problem<TypeParam> want = fresh();
        sgd_step(want.args(hyper), Isa::kScalar);
        for (const Isa isa : supported_isas()) {
          Problem<TypeParam> got = fresh();
          sgd_step(got.args(hyper, 0, n / 3), isa);
          sgd_step(got.args(hyper, n / 3, n - n / 3), isa);
          ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " n " << n << " misalign " << misalign;
        }
      }
    }
  }
}

// A step rounds the parameter once (half a unit of at most 2) and the direction a few times.
TYPED_TEST(Sgd, FollowsTorchsFormulaInWiderPrecisionOver20Steps) {
  constexpr std::int64_t kN = 131;
  constexpr double kEps = std::numeric_limits<TypeParam>::epsilon();
  for (SgdHyper hyper : hypers()) {
    Problem<TypeParam> problem(kN);
    fill_moderate(problem.param, 1.0, kSeed);
    std::vector<long double> param(problem.param.data(), problem.param.data() + kN);
    std::vector<long double> buffer(kN);
    for (int t = 1; t <= 20; ++t) {
      hyper.first_step = t == 1;
      fill_moderate(problem.grad, 1.0, kSeed + static_cast<std::uint64_t>(t));
      sgd_step(problem.args(hyper), best_isa());
      const long double momentum = hyper.momentum;
      for (std::int64_t i = 0; i < kN; ++i) {
        const auto k = static_cast<std::size_t>(i);
        const long double grad = static_cast<long double>(problem.grad[i]) * static_cast<long double>(hyper.factor) +
                                 static_cast<long double>(hyper.weight_decay) * param[k];
        long double direction = grad;
        if (hyper.momentum != 0.0) {
          buffer[k] = t == 1 ? grad : momentum * buffer[k] + (1 - static_cast<long double>(hyper.dampening)) * grad;
          direction = hyper.nesterov ? grad + momentum * buffer[k] : buffer[k];
        }
        param[k] -= static_cast<long double>(hyper.lr) * direction;
      }
    }
    for (std::int64_t i = 0; i < kN; ++i) {
      const auto k = static_cast<std::size_t>(i);
      ASSERT_NEAR(static_cast<double>(problem.param[i]), static_cast<double>(param[k]), 20 * 4 * kEps) << i;
    }
  }
}

TYPED_TEST(Sgd, FirstStepDoesNotReadTheMomentumBuffer) {
  for (const Isa isa : supported_isas()) {
    Problem<TypeParam> problem(37);
    fill_moderate(problem.param, 1.0, kSeed);
    fill_moderate(problem.grad, 1.0, kSeed + 1);
    Problem<TypeParam> poisoned = problem;
    std::fill_n(poisoned.momentum.data(), 37, std::numeric_limits<TypeParam>::quiet_NaN());
    const SgdHyper hyper{.lr = 0.1, .momentum = 0.9, .first_step = true};
    sgd_step(problem.args(hyper), isa);
    sgd_step(poisoned.args(hyper), isa);
    EXPECT_TRUE(same_bits(problem, poisoned)) << name_of(isa);
    EXPECT_TRUE(test::same_bits(problem.grad, problem.momentum)) << name_of(isa);
  }
}

TYPED_TEST(Sgd, CallersFloatingPointEnvironmentChangesNothing) {
  for (const Isa isa : supported_isas()) {
    RandomPatterns random(kSeed);
    Problem<TypeParam> want(4099);
    random.fill(want.param);
    random.fill(want.momentum);
    random.fill(want.grad);
    Problem<TypeParam> got = want;
    sgd_step(want.args(hypers()[4]), isa);
    const SgdArgs args = got.args(hypers()[4]);
    {
      const HostileEnvironment hostile;
      sgd_step(args, isa);
    }
    EXPECT_TRUE(same_bits(want, got)) << name_of(isa);
  }
}

TEST(SgdInHalves, GivesTheBitsOfWholeMastersOnRandomPatterns) {
  constexpr std::int64_t kChunk = 65'521;
  RandomPatterns random(kSeed);
  for (const SgdHyper& hyper : hypers()) {
    Problem<float> start(kChunk);
    random.fill(start.param);
    random.fill(start.momentum);
    random.fill(start.grad);
    const Halves before(start.param);
    Problem<float> want = start;
    sgd_step(want.args(hyper), Isa::kScalar);
    for (const Isa isa : supported_isas()) {
      Problem<float> got = start;
      Halves halves = before;
      SgdArgs args = got.args(hyper);
      args.param = halves.high.data();
      args.low = halves.low.data();
      sgd_step(args, isa);
      ASSERT_TRUE(test::same_bits(want.momentum, got.momentum)) << name_of(isa);
      ASSERT_TRUE(halves.high.guards_intact() && halves.low.guards_intact()) << name_of(isa);
      ASSERT_TRUE(test::same_bits(want.param, halves.joined())) << name_of(isa);
    }
  }
}

TEST(SgdBesideMasters, RoundsTheMasterToTheFloat16ParameterAndKeepsItsBits) {
  RandomPatterns random(kSeed);
  for (const SgdHyper& hyper : hypers()) {
    Problem<float> start(10'007);
    random.fill(start.param);
    random.fill(start.momentum);
    random.fill(start.grad);
    Problem<float> want = start;
    sgd_step(want.args(hyper), Isa::kScalar);
    for (const Isa isa : supported_isas()) {
      Problem<float> got = start;
      GuardedArray<Float16> narrow(got.param.size(), 3);
      SgdArgs args = got.args(hyper);
      args.master = got.param.data();
      args.param = narrow.data();
      sgd_step(args, isa);
      ASSERT_TRUE(narrow.guards_intact() && test::same_bits(want.param, got.param)) << name_of(isa);
      ASSERT_TRUE(test::same_bits(want.momentum, got.momentum)) << name_of(isa);
      for (std::int64_t i = 0; i < narrow.size(); ++i) ASSERT_EQ(narrow[i], Float16(want.param[i])) << i;
    }
  }
}

TEST(SgdErrors, RefusesWhatItCannotDo) {
  Problem<float> problem(8);
  const auto refused = [&](auto change) {
    SgdArgs args = problem.args({.momentum = 0.9});
    change(args);
    EXPECT_THROW(sgd_step(args, Isa::kScalar), Error);
  };
  refused([](SgdArgs& args) { args.n = -1; });
  refused([](SgdArgs& args) { args.dtype = DType::kInt32; });
  refused([](SgdArgs& args) { args.momentum = nullptr; });
  std::int16_t low{};
  refused([&low](SgdArgs& args) {
    args.dtype = DType::kFloat64;
    args.low = &low;
  });
}

}  // namespace
}  // namespace zeroth::kernels
