// The router against a plain one in double, its gradient against differences, and its bits at all widths and splits.
#include "kernel_test_support.h"

#include <kernels/moe/gate.h>
#include <kernels/moe/gate_math.h>

#include <numeric>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

struct GateResult {
  std::vector<std::int32_t> chosen;
  std::vector<double> weights, scores;
  std::vector<std::int64_t> counts;
  std::vector<double> score_sums;
  double z_sum = 0.0;
};

template <class T>
constexpr DType kDType = DTypeOf<T>::value;
template <class T>
using WeightOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

std::vector<double> softmax(const std::vector<double>& x) {
  const double most = *std::max_element(x.begin(), x.end());
  std::vector<double> s;
  for (const double one : x) s.push_back(std::exp(one - most));
  const double sum = std::accumulate(s.begin(), s.end(), 0.0);
  for (double& one : s) one /= sum;
  return s;
}

std::vector<double> weights_like(const GateRule& rule, const std::vector<double>& x, const std::vector<double>& scores,
                                 const std::vector<std::int32_t>& chosen) {
  std::vector<double> weights;
  std::vector<double> logits;
  for (const std::int32_t e : chosen) {
    weights.push_back(scores[static_cast<std::size_t>(e)]);
    logits.push_back(x[static_cast<std::size_t>(e)]);
  }
  if (rule.score == GateScore::kSoftmaxOfChosen) weights = softmax(logits);
  if (rule.renormalize) {
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    for (double& w : weights) w /= sum;
  }
  for (double& w : weights) w *= rule.scale;
  return weights;
}

std::vector<double> scores_like(const GateRule& rule, const std::vector<double>& x) {
  if (rule.score != GateScore::kSigmoid) return softmax(x);
  std::vector<double> s;
  for (const double one : x) s.push_back(1.0 / (1.0 + std::exp(-one)));
  return s;
}

/// keys: those that the choice is made of.
std::vector<std::int32_t> choice_like(const GateRule& rule, std::vector<double> keys) {
  const auto experts = static_cast<std::size_t>(rule.experts);
  const std::size_t size = experts / static_cast<std::size_t>(rule.groups);
  std::vector<std::pair<double, std::size_t>> groups;
  for (std::size_t g = 0; g * size < experts; ++g) {
    std::vector<double> sorted(keys.begin() + static_cast<std::ptrdiff_t>(g * size),
                               keys.begin() + static_cast<std::ptrdiff_t>((g + 1) * size));
    std::sort(sorted.rbegin(), sorted.rend());
    const bool two = rule.group_score == GroupScore::kSumOfTwoGreatest && size > 1;
    groups.emplace_back(-(two ? sorted[0] + sorted[1] : sorted[0]), g);
  }
  std::sort(groups.begin(), groups.end());
  std::vector<std::pair<double, std::int32_t>> order;
  for (std::size_t i = 0; i < static_cast<std::size_t>(rule.kept_groups); ++i) {
    for (std::size_t e = groups[i].second * size; e < (groups[i].second + 1) * size; ++e)
      order.emplace_back(-keys[e], static_cast<std::int32_t>(e));
  }
  std::sort(order.begin(), order.end());
  std::vector<std::int32_t> chosen;
  for (std::int64_t j = 0; j < rule.k; ++j) chosen.push_back(order[static_cast<std::size_t>(j)].second);
  return chosen;
}

template <class T>
GateResult run_gate(const GateRule& rule, const std::vector<T>& logits, const std::vector<float>& bias, Isa isa,
                    std::vector<std::int64_t> bounds = {}) {
  using W = WeightOf<T>;
  const auto tokens = static_cast<std::int64_t>(logits.size()) / rule.experts;
  if (bounds.empty()) bounds = {0, tokens};
  GuardedArray<std::int32_t> chosen(tokens * rule.k);
  GuardedArray<W> weights(tokens * rule.k, 1);
  GuardedArray<W> scores(tokens * rule.experts, 1);
  GateResult result;
  result.counts.resize(static_cast<std::size_t>(rule.experts));
  result.score_sums.resize(static_cast<std::size_t>(rule.experts));
  for (std::size_t part = 0; part + 1 < bounds.size(); ++part) {
    const std::int64_t from = bounds[part];
    gate({.rule = rule,
          .logits = logits.data() + from * rule.experts,
          .dtype = kDType<T>,
          .tokens = bounds[part + 1] - from,
          .bias = bias.empty() ? nullptr : bias.data(),
          .chosen = chosen.data() + from * rule.k,
          .weights = weights.data() + from * rule.k,
          .scores = scores.data() + from * rule.experts,
          .counts = result.counts.data(),
          .score_sums = result.score_sums.data(),
          .z_sum = &result.z_sum},
         isa);
  }
  EXPECT_TRUE(chosen.guards_intact() && weights.guards_intact() && scores.guards_intact());
  result.chosen.assign(chosen.data(), chosen.data() + chosen.size());
  result.weights.assign(weights.data(), weights.data() + weights.size());
  result.scores.assign(scores.data(), scores.data() + scores.size());
  return result;
}

bool same_numbers(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

bool same_result(const GateResult& a, const GateResult& b) {
  return a.chosen == b.chosen && same_numbers(a.weights, b.weights) && same_numbers(a.scores, b.scores) &&
         a.counts == b.counts && same_numbers(a.score_sums, b.score_sums) && same_numbers({a.z_sum}, {b.z_sum});
}

template <class T>
std::vector<T> logits_of(std::int64_t n, std::uint64_t seed, double scale = 4.0) {
  GuardedArray<WeightOf<T>> array(n);
  fill_moderate(array, scale, seed);
  std::vector<T> logits;
  for (std::int64_t i = 0; i < n; ++i) logits.push_back(static_cast<T>(array[i]));
  return logits;
}

std::vector<GateRule> rules() {
  std::vector<GateRule> all;
  const auto add = [&](std::int64_t experts, std::int64_t k, std::int64_t groups, std::int64_t kept) {
    for (const GateScore score : {GateScore::kSoftmax, GateScore::kSigmoid, GateScore::kSoftmaxOfChosen}) {
      for (const bool renormalize : {false, true}) {
        all.push_back({.experts = experts,
                       .k = k,
                       .score = score,
                       .renormalize = renormalize,
                       .scale = renormalize ? 2.5 : 1.0,
                       .groups = groups,
                       .kept_groups = kept,
                       .group_score = renormalize ? GroupScore::kSumOfTwoGreatest : GroupScore::kGreatest});
      }
    }
  };
  add(1, 1, 1, 1);
  add(3, 3, 1, 1);
  add(8, 2, 1, 1);
  add(17, 5, 1, 1);
  add(33, 4, 11, 2);
  add(64, 6, 8, 3);
  add(256, 8, 8, 4);
  add(100, 64, 1, 1);
  return all;
}

template <class T>
void require_gate_like_the_oracle(const GateRule& rule, std::uint64_t seed, bool biased) {
  const std::int64_t tokens = rule.experts > 64 ? 9 : 21;
  std::vector<T> logits = logits_of<T>(tokens * rule.experts, seed);
  const auto bias = biased ? logits_of<float>(rule.experts, seed + 1, 0.5) : std::vector<float>{};
  const GateResult got = run_gate(rule, logits, bias, Isa::kScalar);
  const double tolerance = std::is_same_v<T, double> ? 1e-14 : 2e-6;
  GateResult want;
  want.counts.resize(static_cast<std::size_t>(rule.experts));
  want.score_sums.resize(static_cast<std::size_t>(rule.experts));
  const auto experts = static_cast<std::size_t>(rule.experts);
  const auto k = static_cast<std::size_t>(rule.k);
  for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t) {
    std::vector<double> x;
    for (std::size_t e = 0; e < experts; ++e) x.push_back(to_double(logits[t * experts + e]));
    const std::vector<double> scores = scores_like(rule, x);
    double z = 0.0;
    for (const double one : x) z += std::exp(one);
    want.z_sum += std::pow(std::log(z), 2);
    // The choice is exact for the scores that there are; those are near the true ones.
    std::vector<double> keys;
    for (std::size_t e = 0; e < experts; ++e) {
      const double s = got.scores[t * experts + e];
      ASSERT_NEAR(s, scores[e], tolerance * scores[e]) << "token " << t << " expert " << e;
      want.score_sums[e] += scores[e];
      const double from = rule.score == GateScore::kSoftmaxOfChosen ? x[e] : s;
      const auto of_type = static_cast<WeightOf<T>>(from);
      keys.push_back(biased ? static_cast<double>(of_type + static_cast<WeightOf<T>>(bias[e])) : from);
    }
    const std::vector<std::int32_t> chosen = choice_like(rule, keys);
    const std::vector<double> weights = weights_like(rule, x, scores, chosen);
    for (std::size_t j = 0; j < k; ++j) {
      ASSERT_EQ(got.chosen[t * k + j], chosen[j]) << "token " << t << " choice " << j;
      ASSERT_NEAR(got.weights[t * k + j], weights[j], tolerance * weights[j]);
      ++want.counts[static_cast<std::size_t>(chosen[j])];
    }
  }
  EXPECT_EQ(got.counts, want.counts);
  for (std::size_t e = 0; e < experts; ++e) ASSERT_NEAR(got.score_sums[e], want.score_sums[e], 1e-5);
  EXPECT_NEAR(got.z_sum, want.z_sum, 1e-5 * want.z_sum + static_cast<double>(tokens) * 0x1p-17);
  for (const Isa isa : supported_isas()) {
    EXPECT_TRUE(same_result(got, run_gate(rule, logits, bias, isa))) << name_of(isa);
    EXPECT_TRUE(same_result(got, run_gate(rule, logits, bias, isa, {0, 1, 1, 8, tokens}))) << name_of(isa);
  }
}

TEST(MoeGate, ChoosesLikeAPlainOneWithTheSameBitsInParts) {
  std::uint64_t seed = kSeed;
  for (const GateRule& rule : rules()) {
    for (const bool biased : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "E " << rule.experts << " k " << rule.k << " score "
                                        << static_cast<int>(rule.score) << " biased " << biased << " seed " << seed);
      ASSERT_NO_FATAL_FAILURE(require_gate_like_the_oracle<float>(rule, ++seed, biased));
      ASSERT_NO_FATAL_FAILURE(require_gate_like_the_oracle<double>(rule, ++seed, biased));
      ASSERT_NO_FATAL_FAILURE(require_gate_like_the_oracle<BFloat16>(rule, ++seed, biased));
      ASSERT_NO_FATAL_FAILURE(require_gate_like_the_oracle<Float16>(rule, ++seed, biased));
    }
  }
}

TEST(MoeGate, ExponentialIsWithinTwoUnits) {
  double worst = 0.0;
  double worst64 = 0.0;
  for (int i = 0; i < 200000; ++i) {
    const float x = -87.0F * static_cast<float>(i) / 200000.0F;
    worst = std::max(worst, ulp_error(exp_of(Lane<float>{x}).v, std::exp(static_cast<long double>(x))));
    const double y = -708.0 * i / 200000.0;
    worst64 = std::max(worst64, ulp_error(exp_of(Lane<double>{y}).v, std::exp(static_cast<long double>(y))));
  }
  EXPECT_LT(worst, 2.0);
  EXPECT_LT(worst64, 2.0);
  EXPECT_EQ(exp_of(Lane<float>{0.0F}).v, 1.0F);
  EXPECT_EQ(exp_of(Lane<float>{-INFINITY}).v, 0.0F);
  EXPECT_EQ(exp_of(Lane<double>{-709.0}).v, 0.0);
  for (int i = 1; i < 2000; ++i) {
    const double x = std::pow(1.01, i);
    EXPECT_NEAR(log_of(x), std::log(x), 4e-16 * std::max(1.0, std::log(x)));
  }
}

TEST(MoeGate, TiesGoToTheLowerIndex) {
  for (const Isa isa : supported_isas()) {
    const std::vector<float> logits(40, 1.0F);
    const GateRule rule{.experts = 40, .k = 3};
    EXPECT_EQ(run_gate(rule, logits, {}, isa).chosen, (std::vector<std::int32_t>{0, 1, 2}));
    std::vector<float> some(40, 0.0F);
    some[37] = some[21] = some[39] = 2.0F;
    some[5] = 3.0F;
    EXPECT_EQ(run_gate(rule, some, {}, isa).chosen, (std::vector<std::int32_t>{5, 21, 37}));
    const GateRule grouped{.experts = 40, .k = 3, .groups = 10, .kept_groups = 2};
    EXPECT_EQ(run_gate(grouped, logits, {}, isa).chosen, (std::vector<std::int32_t>{0, 1, 2}));
  }
}

TEST(MoeGate, RowsOfWhichNothingIsKnownAreNaN) {
  for (const GateScore score : {GateScore::kSoftmax, GateScore::kSigmoid, GateScore::kSoftmaxOfChosen}) {
    for (const float wrong : {std::nanf(""), -std::nanf(""), INFINITY, -INFINITY}) {
      for (const std::size_t place : {0U, 13U, 18U}) {
        const GateRule rule{.experts = 19, .k = 2, .score = score};
        std::vector<float> logits = logits_of<float>(3 * 19, kSeed);
        logits[19 + place] = wrong;
        if (wrong == -INFINITY) std::fill_n(logits.begin() + 19, 19, wrong);
        const GateResult want = run_gate(rule, logits, {}, Isa::kScalar);
        EXPECT_EQ(want.chosen[2], 0);
        EXPECT_EQ(want.chosen[3], 1);
        for (std::size_t j = 0; j < 6; ++j) EXPECT_EQ(std::isnan(want.weights[j]), j / 2 == 1);
        for (std::size_t e = 0; e < 57; ++e) EXPECT_EQ(std::isnan(want.scores[e]), e / 19 == 1);
        EXPECT_TRUE(std::isnan(want.score_sums[4]) && std::isnan(want.z_sum));
        for (const Isa isa : supported_isas())
          EXPECT_TRUE(same_result(want, run_gate(rule, logits, {}, isa, {0, 1, 3})));
      }
    }
    // A masked expert has no score, and the others are as without it.
    std::vector<float> logits = logits_of<float>(19, kSeed);
    logits[3] = -INFINITY;
    const GateResult masked = run_gate({.experts = 19, .k = 18, .score = score}, logits, {}, best_isa());
    EXPECT_EQ(masked.scores[3], 0.0);
    EXPECT_EQ(std::count(masked.chosen.begin(), masked.chosen.end(), 3), 0);
  }
}

/// What the gradient is of: sum of g w + sum_e h_e S_e + c z, with the choice held.
double loss_of(const GateRule& rule, const std::vector<double>& x, const std::vector<std::int32_t>& chosen,
               const std::vector<double>& g, const std::vector<double>& h, double c) {
  const std::vector<double> scores = scores_like(rule, x);
  const std::vector<double> weights = weights_like(rule, x, scores, chosen);
  double loss = 0.0;
  for (std::size_t j = 0; j < g.size(); ++j) loss += g[j] * weights[j];
  double sum = 0.0;
  for (std::size_t e = 0; e < x.size(); ++e) {
    loss += h[e] * scores[e];
    sum += std::exp(x[e]);
  }
  return loss + c * std::pow(std::log(sum), 2);
}

template <class T>
void require_gradient(const GateRule& rule, std::uint64_t seed) {
  using W = WeightOf<T>;
  constexpr std::int64_t kTokens = 3;
  const std::vector<T> logits = logits_of<T>(kTokens * rule.experts, seed, 2.0);
  const auto g = logits_of<W>(kTokens * rule.k, seed + 1, 1.0);
  const auto h = logits_of<double>(rule.experts, seed + 2, 1.0);
  const auto own = logits_of<W>(kTokens * rule.experts, seed + 3, 1.0);
  const double c = 0.25;
  const GateResult forward = run_gate(rule, logits, {}, best_isa());
  const auto backward = [&](Isa isa, const std::vector<std::int64_t>& bounds) {
    GuardedArray<T> d(kTokens * rule.experts, 1);
    for (std::size_t part = 0; part + 1 < bounds.size(); ++part) {
      const std::int64_t from = bounds[part];
      gate_backward({.rule = rule,
                     .logits = logits.data() + from * rule.experts,
                     .dtype = kDType<T>,
                     .tokens = bounds[part + 1] - from,
                     .chosen = forward.chosen.data() + from * rule.k,
                     .d_weights = g.data() + from * rule.k,
                     .d_score_sums = h.data(),
                     .d_z_sum = c,
                     .d_scores = own.data() + from * rule.experts,
                     .d_logits = d.data() + from * rule.experts},
                    isa);
    }
    return d;
  };
  const GuardedArray<T> got = backward(Isa::kScalar, {0, kTokens});
  for (const Isa isa : supported_isas()) EXPECT_TRUE(same_bits(got, backward(isa, {0, 2, kTokens}))) << name_of(isa);
  const double tolerance = std::is_same_v<T, double> ? 2e-8 : (std::is_same_v<T, float> ? 2e-5 : 2e-2);
  const auto experts = static_cast<std::size_t>(rule.experts);
  const auto k = static_cast<std::size_t>(rule.k);
  for (std::size_t t = 0; t < kTokens; ++t) {
    std::vector<double> x;
    for (std::size_t e = 0; e < experts; ++e) x.push_back(to_double(logits[t * experts + e]));
    const auto at = static_cast<std::ptrdiff_t>(t * k);
    const auto end = at + static_cast<std::ptrdiff_t>(k);
    const std::vector<std::int32_t> chosen(forward.chosen.begin() + at, forward.chosen.begin() + end);
    const std::vector<double> of_token(g.begin() + at, g.begin() + end);
    std::vector<double> of_scores = h;
    for (std::size_t e = 0; e < experts; ++e) of_scores[e] += own[t * experts + e];
    for (std::size_t e = 0; e < experts; ++e) {
      constexpr double kStep = 1e-5;
      std::vector<double> moved = x;
      moved[e] = x[e] + kStep;
      const double up = loss_of(rule, moved, chosen, of_token, of_scores, c);
      moved[e] = x[e] - kStep;
      const double down = loss_of(rule, moved, chosen, of_token, of_scores, c);
      ASSERT_NEAR(to_double(got[static_cast<std::int64_t>(t * experts + e)]), (up - down) / (2 * kStep), tolerance)
          << "token " << t << " expert " << e;
    }
  }
}

TEST(MoeGate, GradientIsThatOfDifferences) {
  std::uint64_t seed = kSeed;
  for (const GateRule& rule : rules()) {
    if (rule.experts > 64) continue;
    SCOPED_TRACE(::testing::Message() << "E " << rule.experts << " k " << rule.k << " score "
                                      << static_cast<int>(rule.score) << " renormalize " << rule.renormalize);
    ASSERT_NO_FATAL_FAILURE(require_gradient<double>(rule, seed += 3));
    ASSERT_NO_FATAL_FAILURE(require_gradient<float>(rule, seed += 3));
    ASSERT_NO_FATAL_FAILURE(require_gradient<BFloat16>(rule, seed += 3));
  }
}

TEST(MoeGate, ThatCannotBeIsRefused) {
  const Isa isa = best_isa();
  const auto code = [&](const GateRule& rule, std::int64_t tokens = 0, DType dtype = DType::kFloat32) {
    return code_of([&] { gate({.rule = rule, .dtype = dtype, .tokens = tokens}, isa); });
  };
  EXPECT_EQ(code({.experts = 8, .k = 2}), ErrorCode::kInternal);
  EXPECT_EQ(code({.experts = 8, .k = 2}, -1), ErrorCode::kUsage);
  EXPECT_EQ(code({.experts = 8, .k = 2}, 0, DType::kInt32), ErrorCode::kUsage);
  EXPECT_EQ(code({.experts = 0, .k = 0}), ErrorCode::kUsage);
  EXPECT_EQ(code({.experts = 1025, .k = 1}), ErrorCode::kUsage);
  EXPECT_EQ(code({.experts = 8, .k = 9}), ErrorCode::kUsage);
  EXPECT_EQ(code({.experts = 100, .k = 65}), ErrorCode::kUsage);
  EXPECT_EQ(code({.experts = 8, .k = 2, .groups = 3}), ErrorCode::kUsage);
  EXPECT_EQ(code({.experts = 8, .k = 3, .groups = 4, .kept_groups = 1}), ErrorCode::kUsage);
  EXPECT_EQ(code({.experts = 8, .k = 3, .groups = 4, .kept_groups = 5}), ErrorCode::kUsage);
  EXPECT_EQ(code({.experts = 8, .k = 2, .scale = INFINITY}), ErrorCode::kUsage);
  const float bias = INFINITY;
  EXPECT_EQ(code_of([&] { gate({.bias = &bias}, isa); }), ErrorCode::kUsage);
  const std::vector<float> logits(4, 0.0F);
  std::vector<float> d(4);
  const std::vector<std::int32_t> chosen{1, 2};
  try {
    gate_backward(
        {.rule = {.experts = 2}, .logits = logits.data(), .tokens = 2, .chosen = chosen.data(), .d_logits = d.data()},
        isa);
    FAIL() << "took an expert that is none";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_NE(std::string(error.what()).find("token 1, expert 2"), std::string::npos) << error.what();
  }
}

TEST(MoeGate, IsThatOfTheDefaultEnvironment) {
  const GateRule rule{.experts = 64, .k = 4, .score = GateScore::kSigmoid, .renormalize = true};
  const std::vector<float> logits = logits_of<float>(64 * 5, kSeed, 80.0);
  for (const Isa isa : supported_isas()) {
    const GateResult want = run_gate(rule, logits, {}, isa);
    GateResult got;
    {
      const HostileEnvironment hostile;
      got = run_gate(rule, logits, {}, isa);
    }
    EXPECT_TRUE(same_result(want, got));
  }
}

}  // namespace
}  // namespace zeroth::kernels
