// The CUDA kernel of AdamW on a device: every bit is that of the CPU kernel.
#include "cuda/device_test_support.h"

#include <kernels/adamw/adamw.h>
#include <kernels/adamw/adamw_cuda.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

auto load_kernel() {
  return load_entry<decltype(zeroth_cuda_adamw)>("zeroth_cuda_adamw");
}

AdamWHyper usual_hyper() {
  return {.lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .factor = 1.0 / 6.0, .step = 7};
}

template <class T>
struct Problem {
  explicit Problem(std::int64_t n) : param(n), exp_avg(n), exp_avg_sq(n), grad(n) {}

  template <class Random>
  static Problem filled(std::int64_t n, Random& random) {
    Problem problem(n);
    for (GuardedArray<T>* array : {&problem.param, &problem.exp_avg, &problem.exp_avg_sq, &problem.grad}) {
      random.fill(*array);
    }
    return problem;
  }

  GuardedArray<T> param, exp_avg, exp_avg_sq, grad;
};

struct Options {
  AdamWHyper hyper = usual_hyper();
  std::int64_t misalign = 0;
  bool split = false;  ///< masters in two halves, of float
};

/// One step on the device and one on the CPU from the same start.
template <class T>
::testing::AssertionResult same_step(const Problem<T>& start, const Options& options) {
  const bool split = options.split && sizeof(T) == sizeof(float);
  GuardedArray<BFloat16> high(start.param.size());
  GuardedArray<std::int16_t> low(start.param.size());
  for (std::int64_t i = 0; split && i < start.param.size(); ++i) {
    // A NaN that is not canonical has no halves.
    const auto master = static_cast<float>(start.param[i]);
    split_master(master != master ? std::numeric_limits<float>::quiet_NaN() : master, high[i], low[i]);
  }
  DeviceArray<BFloat16> device_high(high, options.misalign);
  DeviceArray<std::int16_t> device_low(low, options.misalign);
  DeviceArray<T> param(start.param, options.misalign);
  DeviceArray<T> exp_avg(start.exp_avg, options.misalign);
  DeviceArray<T> exp_avg_sq(start.exp_avg_sq, options.misalign);
  DeviceArray<T> grad(start.grad, options.misalign);
  AdamWArgs args{.param = split ? static_cast<void*>(device_high.data()) : param.data(),
                 .low = split ? device_low.data() : nullptr,
                 .exp_avg = exp_avg.data(),
                 .exp_avg_sq = exp_avg_sq.data(),
                 .grad = grad.data(),
                 .n = start.param.size(),
                 .dtype = DTypeOf<T>::value,
                 .coefficients = adamw_coefficients(options.hyper)};
  require_ok(load_kernel()(&args, nullptr), "zeroth_cuda_adamw");
  require_ok(cudaDeviceSynchronize(), "the kernel");

  Problem<T> want = start;
  args.param = split ? static_cast<void*>(high.data()) : want.param.data();
  args.low = split ? low.data() : nullptr;
  args.exp_avg = want.exp_avg.data();
  args.exp_avg_sq = want.exp_avg_sq.data();
  args.grad = want.grad.data();
  adamw_step(args, best_isa());
  if (auto result = param.has_bits_of(want.param); !result) return result << " in param";
  if (auto result = device_high.has_bits_of(high); !result) return result << " in the upper halves";
  if (auto result = device_low.has_bits_of(low); !result) return result << " in the lower halves";
  if (auto result = exp_avg.has_bits_of(want.exp_avg); !result) return result << " in exp_avg";
  if (auto result = exp_avg_sq.has_bits_of(want.exp_avg_sq); !result) return result << " in exp_avg_sq";
  if (auto result = grad.has_bits_of(start.grad); !result) return result << " in grad, which is only read";
  return ::testing::AssertionSuccess();
}

template <class T>
class AdamWDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = why_no_device();
    if (!reason.empty()) GTEST_SKIP() << "no CUDA device: " << reason;
  }
};
using StateTypes = ::testing::Types<float, double>;
TYPED_TEST_SUITE(AdamWDevice, StateTypes);

TYPED_TEST(AdamWDevice, GivesTheBitsOfTheCpuOnRandomPatterns) {
  constexpr std::int64_t kChunk = 1'000'003;
  RandomPatterns random(kSeed);
  for (int round = 0; round < 12; ++round) {
    Options options;
    options.hyper.decoupled = round % 2 == 0;
    options.hyper.step = 1 + round;
    options.hyper.eps = round % 3 == 0 ? 0.0 : 1e-8;
    options.split = round % 4 >= 2;
    ASSERT_TRUE(same_step(Problem<TypeParam>::filled(kChunk, random), options))
        << "seed " << kSeed << ", round " << round;
  }
}

/// Every pair of values where arithmetic is delicate, as parameter and as gradient.
TYPED_TEST(AdamWDevice, GivesTheBitsOfTheCpuOnDelicateValues) {
  using Limits = std::numeric_limits<TypeParam>;
  std::vector<TypeParam> values;
  for (const TypeParam value :
       {TypeParam{0}, TypeParam{1}, Limits::denorm_min(), Limits::min() - Limits::denorm_min(), Limits::min(),
        Limits::epsilon(), Limits::max(), Limits::infinity(), Limits::quiet_NaN(), Limits::signaling_NaN()}) {
    values.push_back(value);
    values.push_back(-value);
  }
  const auto count = static_cast<std::int64_t>(values.size());
  Problem<TypeParam> start(count * count * count);
  for (std::int64_t i = 0; i < start.param.size(); ++i) {
    start.param[i] = values[static_cast<std::size_t>(i % count)];
    start.grad[i] = values[static_cast<std::size_t>(i / count % count)];
    start.exp_avg[i] = values[static_cast<std::size_t>(i / (count * count))];
    start.exp_avg_sq[i] = values[static_cast<std::size_t>((i / 7) % count)];
  }
  for (const bool decoupled : {true, false}) {
    Options options;
    options.hyper.decoupled = decoupled;
    ASSERT_TRUE(same_step(start, options)) << (decoupled ? "AdamW" : "Adam");
  }
}

TYPED_TEST(AdamWDevice, EveryTailLengthAndMisalignmentGivesTheBitsOfTheCpu) {
  RandomPatterns random(kSeed);
  for (std::int64_t n = 0; n <= 130; ++n) {
    for (const std::int64_t misalign : {0, 1, 3}) {
      for (const bool split : {false, true}) {
        ASSERT_TRUE(same_step(Problem<TypeParam>::filled(n, random), {.misalign = misalign, .split = split}))
            << "n " << n << " misalign " << misalign << (split ? " in halves" : "") << ", seed " << kSeed;
      }
    }
  }
}

// More packs than the largest grid has threads, so that threads go round again, and a tail.
TYPED_TEST(AdamWDevice, ARangeLongerThanTheGridGivesTheBitsOfTheCpu) {
  constexpr std::int64_t kGridElements = std::int64_t{16384} * 256 * 4;
  RandomPatterns random(kSeed);
  ASSERT_TRUE(same_step(Problem<TypeParam>::filled(kGridElements + 12'347, random), {})) << "seed " << kSeed;
}

// Needs no device: nothing is launched.
TEST(AdamWModule, LoadsAndRefusesWhatItCannotDo) {
  auto* const kernel = load_kernel();
  EXPECT_EQ(kernel(nullptr, nullptr), cudaErrorInvalidValue);
  const auto refused = [&](auto change) {
    AdamWArgs args{.n = 8};
    change(args);
    EXPECT_EQ(kernel(&args, nullptr), cudaErrorInvalidValue);
  };
  refused([](AdamWArgs& args) { args.n = -1; });
  refused([](AdamWArgs& args) { args.dtype = DType::kBFloat16; });
  std::int16_t low{};
  refused([&low](AdamWArgs& args) {
    args.dtype = DType::kFloat64;
    args.low = &low;
  });
  const AdamWArgs nothing{.n = 0};
  EXPECT_EQ(kernel(&nothing, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace zeroth::kernels
