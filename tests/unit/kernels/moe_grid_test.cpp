// The bodies of the CUDA kernels of a mixture of experts on the host: threads in a drawn order give the bits of the CPU
// kernels.
#include "kernel_test_support.h"
#include "support/grid_threads.h"

#include <kernels/moe/gate_grid.h>
#include <kernels/moe/permute_grid.h>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

template <class T>
using Weight = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
class MoeOnGrid : public ::testing::Test {
 protected:
  /// Runs on so many threads; false where the grid refuses.
  template <class Op>
  static bool run(std::int64_t threads, const Op& op) {
    ScrambledThreads order(threads, kSeed);
    const auto launch = [&](const auto& body, std::int64_t with_work) {
      EXPECT_GT(with_work, 0);
      order.each([&](GridThread thread) { body(thread); });
    };
    return op(launch);
  }
  static GuardedArray<T> numbers(std::int64_t n, std::uint64_t seed, double scale, std::int64_t misalign) {
    GuardedArray<Weight<T>> from(n);
    fill_moderate(from, scale, seed);
    GuardedArray<T> array(n, misalign);
    for (std::int64_t i = 0; i < n; ++i) array[i] = static_cast<T>(from[i]);
    return array;
  }
  static constexpr DType kType = DTypeOf<T>::value;
};
using RowTypes = ::testing::Types<float, double, BFloat16, Float16>;
TYPED_TEST_SUITE(MoeOnGrid, RowTypes);

TYPED_TEST(MoeOnGrid, GateHasTheBitsOfTheCpu) {
  using T = TypeParam;
  using W = Weight<T>;
  constexpr std::int64_t kTokens = 11;
  for (const GateScore score : {GateScore::kSoftmax, GateScore::kSigmoid, GateScore::kSoftmaxOfChosen}) {
    for (const std::int64_t experts : {std::int64_t{1}, std::int64_t{6}, std::int64_t{48}}) {
      const bool grouped = experts > 1;
      const GateRule rule{.experts = experts,
                          .k = grouped ? 2 : 1,
                          .score = score,
                          .renormalize = experts == 6,
                          .scale = 1.5,
                          .groups = grouped ? 3 : 1,
                          .kept_groups = grouped ? 2 : 1};
      GuardedArray<T> logits = this->numbers(kTokens * experts, 5, 6.0, 0);
      logits[4 * experts] = static_cast<T>(std::numeric_limits<W>::quiet_NaN());
      GuardedArray<float> bias(experts);
      fill_moderate(bias, 0.2, 6);
      struct Out {
        GuardedArray<std::int32_t> chosen;
        GuardedArray<W> weights, scores;
        GuardedArray<std::int64_t> counts;
        GuardedArray<double> score_sums, z_sum;
        GuardedArray<T> d_logits;
      };
      const auto out_of = [&] {
        return Out{GuardedArray<std::int32_t>(kTokens * rule.k),
                   GuardedArray<W>(kTokens * rule.k),
                   GuardedArray<W>(kTokens * experts),
                   GuardedArray<std::int64_t>(experts),
                   GuardedArray<double>(experts),
                   GuardedArray<double>(1),
                   GuardedArray<T>(kTokens * experts)};
      };
      GuardedArray<W> d_weights(kTokens * rule.k);
      GuardedArray<double> d_sums(experts);
      fill_moderate(d_weights, 1.0, 7);
      fill_moderate(d_sums, 1.0, 8);
      GuardedArray<W> d_scores(kTokens * experts);
      fill_moderate(d_scores, 1.0, 9);
      const auto args_of = [&](Out& out) {
        return GateArgs{rule,
                        logits.data(),
                        this->kType,
                        kTokens,
                        bias.data(),
                        out.chosen.data(),
                        out.weights.data(),
                        out.scores.data(),
                        out.counts.data(),
                        out.score_sums.data(),
                        out.z_sum.data()};
      };
      const auto backward_of = [&](Out& out) {
        return GateBackwardArgs{
            rule, logits.data(),   this->kType,        kTokens, out.chosen.data(), d_weights.data(), d_sums.data(),
            0.5,  d_scores.data(), out.d_logits.data()};
      };
      Out want = out_of();
      gate(args_of(want), Isa::kScalar);
      gate_backward(backward_of(want), Isa::kScalar);
      for (const std::int64_t threads : {1, 4, 60}) {
        Out got = out_of();
        GuardedArray<double> workspace(
            static_cast<std::int64_t>(gate_workspace(rule, this->kType, kTokens) / sizeof(double)));
        ASSERT_TRUE(
            this->run(threads, [&](auto& launch) { return gate_on_grid(args_of(got), workspace.data(), launch); }));
        ASSERT_TRUE(this->run(
            threads, [&](auto& launch) { return gate_backward_on_grid(backward_of(got), workspace.data(), launch); }));
        ASSERT_TRUE(workspace.guards_intact());
        EXPECT_TRUE(same_bits(want.chosen, got.chosen));
        EXPECT_TRUE(same_bits(want.weights, got.weights));
        EXPECT_TRUE(same_bits(want.scores, got.scores));
        EXPECT_TRUE(same_bits(want.counts, got.counts));
        EXPECT_TRUE(same_bits(want.score_sums, got.score_sums));
        EXPECT_TRUE(same_bits(want.z_sum, got.z_sum));
        EXPECT_TRUE(same_bits(want.d_logits, got.d_logits));
      }
    }
  }
}

TYPED_TEST(MoeOnGrid, RowsHaveTheBitsOfTheCpu) {
  using T = TypeParam;
  using W = Weight<T>;
  constexpr std::int64_t kTokens = 5;
  constexpr std::int64_t kChoices = 2;
  const std::vector<std::int32_t> slot_of{3, -1, 0, 6, -1, -1, 2, 1, 5, 4};
  const std::vector<std::int32_t> source_of{2, 7, 6, 0, 9, 8, 3};
  for (const std::int64_t width : {0, 1, 16, 21}) {
    for (const std::int64_t misalign : {0, 1}) {
      for (const bool with_weights : {false, true}) {
        const GuardedArray<T> in = this->numbers(kTokens * width, 1, 1.0, misalign);
        const GuardedArray<T> rows = this->numbers(7 * width, 2, 1.0, misalign);
        GuardedArray<W> weights(kTokens * kChoices);
        fill_moderate(weights, 1.0, 3);
        const W* const given = with_weights ? weights.data() : nullptr;
        GuardedArray<T> out(7 * width, misalign), sum(kTokens * width, misalign);
        GuardedArray<T> got_out(7 * width, misalign), got_sum(kTokens * width, misalign);
        GuardedArray<W> product(kTokens * kChoices), got_product(kTokens * kChoices);
        PermuteArgs there{out.data(), in.data(), this->kType, width, kTokens, kChoices, 7, source_of.data(), given};
        UnpermuteArgs back{sum.data(), rows.data(), this->kType,    width, kTokens,
                           kChoices,   7,           slot_of.data(), given, in.data()};
        UnpermuteArgs dot = back;
        dot.out = product.data();
        permute(there, Isa::kScalar);
        unpermute(back, Isa::kScalar);
        unpermute_weights(dot, Isa::kScalar);
        there.out = got_out.data();
        back.out = got_sum.data();
        dot.out = got_product.data();
        for (const std::int64_t threads : {1, 9, 300}) {
          ASSERT_TRUE(this->run(threads, [&](auto& launch) { return permute_on_grid(there, launch); }));
          ASSERT_TRUE(this->run(threads, [&](auto& launch) { return unpermute_on_grid(back, launch); }));
          ASSERT_TRUE(this->run(threads, [&](auto& launch) { return unpermute_weights_on_grid(dot, launch); }));
          EXPECT_TRUE(same_bits(out, got_out));
          EXPECT_TRUE(same_bits(sum, got_sum));
          EXPECT_TRUE(same_bits(product, got_product));
        }
      }
    }
  }
}

TYPED_TEST(MoeOnGrid, JitterHasTheBitsOfTheCpu) {
  using T = TypeParam;
  const GuardedArray<T> in = this->numbers(4 * 19, 1, 1.0, 0);
  GuardedArray<T> want(4 * 19), got(4 * 19);
  JitterArgs args{want.data(), in.data(), this->kType, 4, 19, 0.1F, 77, 5};
  if constexpr (sizeof(T) < 8) jitter(args, Isa::kScalar);
  args.dst = got.data();
  const bool taken = this->run(7, [&](auto& launch) { return jitter_on_grid(args, launch); });
  EXPECT_EQ(taken, sizeof(T) < 8);
  EXPECT_TRUE(same_bits(want, got));
}

TEST(MoeOnGridLimits, RefusesWhatTheHostRefuses) {
  const auto none = [](const auto&, std::int64_t) { FAIL() << "launched"; };
  double sums = 0.0;
  EXPECT_FALSE(gate_on_grid({.rule = {.experts = 0}}, nullptr, none));
  EXPECT_FALSE(gate_on_grid({.tokens = -1}, nullptr, none));
  EXPECT_FALSE(gate_on_grid({.dtype = DType::kInt32}, nullptr, none));
  EXPECT_FALSE(gate_on_grid({.score_sums = &sums}, nullptr, none));
  EXPECT_TRUE(gate_on_grid({}, nullptr, none));
  EXPECT_FALSE(gate_backward_on_grid({.rule = {.k = 2}}, nullptr, none));
  EXPECT_FALSE(permute_on_grid({.width = -1}, none));
  EXPECT_FALSE(permute_on_grid({.dtype = DType::kInt64}, none));
  EXPECT_FALSE(unpermute_on_grid({.k = 65}, none));
  EXPECT_FALSE(unpermute_weights_on_grid({.slots = -1}, none));
  EXPECT_FALSE(jitter_on_grid({.epsilon = 2.0F}, none));
}

}  // namespace
}  // namespace zeroth::kernels
