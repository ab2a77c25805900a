#include "kernel_test_support.h"

#include <kernels/lamb/lamb.h>
#include <zeroth/base/error.h>

#include <cmath>
#include <vector>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

template <class T>
class Lamb : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Lamb, Types);

/// Arrays of one call. Variances are not negative.
template <class T>
struct Arrays {
  Arrays(std::int64_t n, std::int64_t misalign, std::uint64_t seed) {
    RandomPatterns random(seed);
    for (std::size_t which = 0; which < arrays.size(); ++which) {
      arrays[which] = std::make_unique<GuardedArray<T>>(n, misalign);
      for (std::int64_t i = 0; i < n; ++i) {
        const auto value = static_cast<T>(static_cast<double>(random.next<std::int32_t>()) * 0x1p-29);
        (*arrays[which])[i] = which == kVariance || which == kFresh ? value * value : value;
      }
    }
    for (std::int64_t i = 0; i < n; i += 5) (*arrays[kVariance])[i] = T{0};
  }
  T* at(std::size_t which) const { return arrays[which]->data(); }
  enum : std::size_t { kParam, kMomentum, kVariance, kLast, kFresh, kGrad };
  std::array<std::unique_ptr<GuardedArray<T>>, 6> arrays;
};

template <class T>
LambArgs args_of(const Arrays<T>& a, std::int64_t n, const LambCoefficients& coefficients, bool keeps, bool has_grad) {
  return {.param = a.at(Arrays<T>::kParam),
          .exp_avg = a.at(Arrays<T>::kMomentum),
          .exp_avg_sq = a.at(Arrays<T>::kVariance),
          .last = keeps || !has_grad ? a.at(Arrays<T>::kLast) : nullptr,
          .fresh = keeps || !has_grad ? a.at(Arrays<T>::kFresh) : nullptr,
          .grad = has_grad ? a.at(Arrays<T>::kGrad) : nullptr,
          .n = n,
          .dtype = DTypeOf<T>::value,
          .coefficients = coefficients};
}

TYPED_TEST(Lamb, HasTheNumbersOfItsFormulaAndTheSameBitsAtEveryWidth) {
  using T = TypeParam;
  using A = Arrays<T>;
  const double tolerance = std::is_same_v<T, float> ? 2e-6 : 1e-14;
  for (const std::int64_t n : {0, 1, 3, 16, 17, 1023, 1024, 1025, 3000}) {
    for (const int form : {0, 1, 2, 3}) {  // plain, without correction, with copies, without a gradient
      const LambHyper hyper{.beta1 = 0.8,
                            .beta2 = 0.95,
                            .eps = 1e-3,
                            .weight_decay = form == 1 ? 0.0 : 0.1,
                            .bias_correction = form != 1,
                            .factor = 0.25,
                            .step = 7,
                            .variance_step = form == 3 ? 5 : 0};
      LambCoefficients coefficients = lamb_coefficients(hyper);
      coefficients.adam.step_size = 0.01;
      const std::int64_t blocks = (n + kNormBlock - 1) / kNormBlock;
      const A before(n, 0, kSeed);
      std::vector<double> want_param(static_cast<std::size_t>(n));
      std::vector<double> measures(static_cast<std::size_t>(2 * blocks), 0.0);
      for (std::int64_t i = 0; i < n; ++i) {
        const auto value = [&](std::size_t which) { return static_cast<double>(before.at(which)[i]); };
        const auto block = static_cast<std::size_t>(i / kNormBlock);
        const auto corrected = [&](double beta, std::int64_t t) {
          return hyper.bias_correction ? 1.0 - std::pow(beta, static_cast<double>(t)) : 1.0;
        };
        const double g = 0.25 * value(A::kGrad);
        double m = value(A::kMomentum);
        double v = value(A::kVariance);
        if (form < 3) {
          m += (1.0 - hyper.beta1) * (g - m);
          v = hyper.beta2 * v + (1.0 - hyper.beta2) * g * g;
        } else {
          const double there = (m - hyper.beta1 * value(A::kLast)) / (1.0 - hyper.beta1);
          const double fresh = hyper.beta2 * value(A::kFresh) + (1.0 - hyper.beta2) * there * there;
          const double ratio = (std::sqrt(v / corrected(hyper.beta2, 5)) + hyper.eps) /
                               (std::sqrt(fresh / corrected(hyper.beta2, 7)) + hyper.eps);
          double& most = measures[static_cast<std::size_t>(blocks) + block];
          if (v > 0) most = std::max(most, ratio);
        }
        const double denominator = std::sqrt(v / corrected(hyper.beta2, form == 3 ? 5 : 7)) + hyper.eps;
        const double direction = v > 0 ? m / corrected(hyper.beta1, 7) / denominator : 0.0;
        const double u = direction + hyper.weight_decay * value(A::kParam);
        want_param[static_cast<std::size_t>(i)] = value(A::kParam) - 0.01 * u;
        if (form == 3) continue;
        measures[block] += value(A::kParam) * value(A::kParam);
        measures[static_cast<std::size_t>(blocks) + block] += u * u;
      }
      std::vector<A> got;
      std::vector<std::vector<double>> measured;
      for (const Isa isa : supported_isas()) {
        for (const std::int64_t misalign : {0, 1}) {
          got.emplace_back(n, misalign, kSeed);
          measured.emplace_back(static_cast<std::size_t>(2 * blocks), 0.0);
          LambArgs args = args_of(got.back(), n, coefficients, form == 2, form < 3);
          args.param_squares = measured.back().data();
          args.update_measure = measured.back().data() + blocks;
          lamb_measure(args, isa);
          lamb_apply(args, isa);
          EXPECT_EQ(measured.back(), measured.front()) << name_of(isa) << " n " << n << " form " << form;
          for (std::size_t which = 0; which < got.back().arrays.size(); ++which)
            ASSERT_TRUE(same_bits(*got.front().arrays[which], *got.back().arrays[which]))
                << name_of(isa) << " n " << n << " form " << form << " array " << which;
        }
      }
      for (std::int64_t i = 0; i < n; ++i) {
        const auto wanted = want_param[static_cast<std::size_t>(i)];
        ASSERT_NEAR(static_cast<double>(got.front().at(A::kParam)[i]), wanted, tolerance * (1 + std::fabs(wanted)));
        if (form != 2) continue;
        ASSERT_EQ(got.front().at(A::kLast)[i], got.front().at(A::kMomentum)[i]);
        ASSERT_EQ(got.front().at(A::kFresh)[i], got.front().at(A::kVariance)[i]);
      }
      for (std::size_t i = 0; i < measures.size(); ++i)
        ASSERT_NEAR(measured.front()[i], measures[i], tolerance * (1 + measures[i])) << "n " << n << " form " << form;
    }
  }
}

TEST(LambArguments, ThatCannotBeAreRefused) {
  float value = 0;
  std::int16_t low = 0;
  const auto refuses = [](const auto& kernel, const LambArgs& args) {
    try {
      kernel(args, best_isa());
    } catch (const Error& error) {
      return error.code() == ErrorCode::kUsage;
    }
    return false;
  };
  for (const auto& kernel : {lamb_measure, lamb_apply}) {
    EXPECT_TRUE(refuses(kernel, {.n = -1}));
    EXPECT_TRUE(refuses(kernel, {.n = 1, .dtype = DType::kBFloat16}));
    EXPECT_TRUE(refuses(kernel, {.low = &low, .n = 1, .dtype = DType::kFloat64}));
    EXPECT_TRUE(refuses(kernel, {.low = &low, .master = &value, .n = 1}));
    EXPECT_FALSE(refuses(kernel, {}));
  }
  EXPECT_TRUE(refuses(lamb_measure, {.n = 1})) << "neither a gradient nor momenta of before";
}

}  // namespace
}  // namespace zeroth::kernels
