#include "kernel_test_support.h"

#include <kernels/lion/lion.h>
#include <zeroth/base/error.h>

#include <cmath>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

template <class T>
class Lion : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Lion, Types);

TYPED_TEST(Lion, HasTheBitsOfItsFormulaAtEveryWidth) {
  using T = TypeParam;
  RandomPatterns random(kSeed);
  for (const std::int64_t n : {0, 1, 3, 8, 15, 16, 17, 100, 1027}) {
    for (const std::int64_t misalign : {0, 1}) {
      for (const LionHyper& hyper :
           {LionHyper{.lr = 0.03, .factor = 0.25}, LionHyper{.lr = 1e-4, .beta2 = 0.98, .weight_decay = 0.1}}) {
        GuardedArray<T> param(n, misalign);
        GuardedArray<T> exp_avg(n, misalign);
        GuardedArray<T> grad(n, misalign);
        random.fill(param);
        random.fill(exp_avg);
        random.fill(grad);
        for (std::int64_t i = 0; i < n; i += 3) exp_avg[i] = grad[i] = i % 2 == 0 ? T{0} : -T{0};
        GuardedArray<T> want(n);
        GuardedArray<T> want_avg(n);
        for (std::int64_t i = 0; i < n; ++i) {
          const T fresh = grad[i] * static_cast<T>(hyper.factor) - exp_avg[i];
          const T mix = std::fma(static_cast<T>(1.0 - hyper.beta1), fresh, exp_avg[i]);
          const T sign = mix > T{0} ? T{1} : mix < T{0} ? T{-1} : mix;
          const T decayed = param[i] * static_cast<T>(1.0 - hyper.lr * hyper.weight_decay);
          want[i] = canonical_nan(std::fma(static_cast<T>(-hyper.lr), sign, decayed));
          want_avg[i] = canonical_nan(std::fma(static_cast<T>(1.0 - hyper.beta2), fresh, exp_avg[i]));
        }
        for (const Isa isa : supported_isas()) {
          GuardedArray<T> got(n, misalign);
          GuardedArray<T> got_avg(n, misalign);
          std::copy_n(param.data(), n, got.data());
          std::copy_n(exp_avg.data(), n, got_avg.data());
          lion_step({.param = got.data(),
                     .exp_avg = got_avg.data(),
                     .grad = grad.data(),
                     .n = n,
                     .dtype = DTypeOf<T>::value,
                     .hyper = hyper},
                    isa);
          ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " n " << n;
          ASSERT_TRUE(same_bits(want_avg, got_avg)) << name_of(isa) << " n " << n;
        }
      }
    }
  }
}

TEST(LionArguments, ThatCannotBeAreRefused) {
  float value = 0;
  std::int16_t low = 0;
  const auto refuses = [](const LionArgs& args) {
    try {
      lion_step(args, best_isa());
    } catch (const Error& error) {
      return error.code() == ErrorCode::kUsage;
    }
    return false;
  };
  EXPECT_TRUE(refuses({.n = -1}));
  EXPECT_TRUE(refuses({.n = 1, .dtype = DType::kBFloat16}));
  EXPECT_TRUE(refuses({.low = &low, .n = 1, .dtype = DType::kFloat64}));
  EXPECT_TRUE(refuses({.low = &low, .master = &value, .n = 1}));
}

}  // namespace
}  // namespace zeroth::kernels
