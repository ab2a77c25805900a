// A layer of experts with its gate is what its header says: beside loops in double, with draws counted here again.
#include "support/error_of.h"
#include "support/torch_ranks.h"

#include <kernels/common/uniform.h>
#include <zeroth/comm/mesh.h>
#include <zeroth/libtorch/balance.h>
#include <zeroth/libtorch/collectives.h>
#include <zeroth/libtorch/moe.h>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using libtorch::BalanceBy;
using libtorch::ChoiceSchedule;
using libtorch::Gate;
using libtorch::Gated;
using libtorch::GatedExperts;
using libtorch::GateNoise;
using libtorch::GateOptions;
using libtorch::Moe;
using libtorch::MoeOptions;
using libtorch::RankGroup;
using libtorch::RouterScore;
using libtorch::Routing;
using torch::Tensor;

constexpr std::int64_t kMoeExperts = 4;
constexpr std::int64_t kMoeWidth = 6;
constexpr std::int64_t kMoeHidden = 3;
constexpr std::int64_t kMoeTokens = 13;
constexpr std::uint64_t kMoeSeed = 7;

Tensor moe_numbers(std::vector<std::int64_t> shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn(shape, generator, torch::kFloat64);
}

double distance(const Tensor& got, const Tensor& expected) {
  return got.numel() == 0 ? 0.0 : (got - expected).abs().max().item<double>();
}

/// SplitMix64, written again.
std::uint64_t split_mix(std::uint64_t seed, std::uint64_t counter) {
  std::uint64_t z = seed + (counter + 1) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ z >> 30U) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ z >> 27U) * 0x94d049bb133111ebULL;
  return z ^ z >> 31U;
}

/// draw: 1 drops, 2 jitter, 3 Gumbel.
std::uint64_t draw_seed(std::uint64_t draw, std::uint64_t forward, std::uint64_t place) {
  return split_mix(split_mix(split_mix(kMoeSeed, draw), forward), place);
}

double gumbel_at(std::uint64_t seed, std::int64_t at) {
  const double uniform = (static_cast<double>(split_mix(seed, static_cast<std::uint64_t>(at)) >> 12U) + 0.5) * 0x1p-52;
  return -std::log(-std::log(uniform));
}

double jitter_at(std::uint64_t seed, std::int64_t token, std::int64_t column) {
  // priority(seed, token, 0) of kernels/moe/dispatch.h is number 64 token of SplitMix64.
  const auto lower = static_cast<std::uint32_t>(split_mix(seed, static_cast<std::uint64_t>(token) * 64U));
  const float uniform = kernels::uniform_of(lower, static_cast<std::uint32_t>(column));
  return static_cast<double>(std::fma(2.0F * 0.01F, uniform, 1.0F - 0.01F));
}

/// Numbers of the greatest values, of equal ones the lower.
std::vector<std::int64_t> best_of(const std::vector<double>& values) {
  std::vector<std::int64_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](std::int64_t a, std::int64_t b) {
    return values[static_cast<std::size_t>(a)] > values[static_cast<std::size_t>(b)];
  });
  return order;
}

struct MoeCase {
  const char* name;
  GateOptions gate;
  bool residual = false;
  bool shared = false;
};

GateOptions gate_with(std::int64_t k, double factor, bool draws_kept = false) {
  GateOptions options;
  options.router.choices = k;
  options.capacity_factor = factor;
  options.min_capacity = 1;
  options.use_rts = draws_kept;
  options.seed = kMoeSeed;
  return options;
}

std::vector<MoeCase> moe_cases() {
  std::vector<MoeCase> cases;
  cases.push_back({.name = "drops by position", .gate = gate_with(2, 0.6)});
  cases.push_back({.name = "residual and shared", .gate = gate_with(1, 0.7), .residual = true, .shared = true});
  cases.push_back({.name = "drops by draw", .gate = gate_with(2, 0.5, true)});
  cases.push_back({.name = "jitter", .gate = gate_with(3, 0.8)});
  cases.back().gate.noise = GateNoise::kJitter;
  cases.push_back({.name = "noise", .gate = gate_with(2, 0.8)});
  cases.back().gate.noise = GateNoise::kGumbel;
  cases.push_back({.name = "second drawn", .gate = gate_with(2, 0.8)});
  cases.back().gate.top2_2nd_expert_sampling = true;
  cases.push_back({.name = "scale", .gate = gate_with(2, 0.8)});
  cases.back().gate.router.scale = 2.5;
  cases.push_back({.name = "no drops", .gate = gate_with(2, 0.1)});
  cases.back().gate.drop_tokens = false;
  return cases;
}

Moe made_moe(const MoeCase& one) {
  GatedExperts experts(moe_numbers({kMoeExperts, 2 * kMoeHidden, kMoeWidth}, 1),
                       moe_numbers({kMoeExperts, kMoeWidth, kMoeHidden}, 2));
  const torch::nn::Linear residual(torch::nn::LinearOptions(kMoeWidth, kMoeWidth));
  const torch::nn::Linear shared(torch::nn::LinearOptions(kMoeWidth, kMoeWidth));
  const MoeOptions options{.width = kMoeWidth, .num_experts = kMoeExperts, .gate = one.gate};
  Moe moe(options, libtorch::experts_module(experts),
          one.residual ? libtorch::row_module(residual) : libtorch::RowModule{},
          one.shared ? libtorch::row_module(shared) : libtorch::RowModule{});
  moe->to(torch::kFloat64);
  const torch::NoGradGuard no_gradient;
  std::uint64_t seed = 3;
  for (auto& item : moe->named_parameters()) item.value().copy_(moe_numbers(item.value().sizes().vec(), ++seed));
  return moe;
}

/// Forward `number` of rank `place`, token by token; what is dropped, by position or by draw.
Tensor by_hand(const MoeCase& one, Moe& moe, const Tensor& x, std::uint64_t number, std::uint64_t place) {
  const GateOptions& gate = one.gate;
  const auto k = static_cast<std::size_t>(gate.router.choices);
  const auto parameters = moe->named_parameters();
  std::vector<std::vector<std::int64_t>> chosen;
  std::vector<Tensor> weights;
  for (std::int64_t token = 0; token < x.size(0); ++token) {
    Tensor input = x[token];
    if (gate.noise == GateNoise::kJitter) {
      std::vector<double> factors;
      for (std::int64_t column = 0; column < kMoeWidth; ++column)
        factors.push_back(jitter_at(draw_seed(2, number, place), token, column));
      input = input * torch::tensor(factors, torch::kFloat64);
    }
    const Tensor logits = parameters["gate.weight"].matmul(input);
    std::vector<double> plain, noisy;
    for (std::int64_t expert = 0; expert < kMoeExperts; ++expert) {
      plain.push_back(logits[expert].item<double>());
      noisy.push_back(plain.back() + gumbel_at(draw_seed(3, number, place), token * kMoeExperts + expert));
    }
    std::vector<std::int64_t> order = best_of(gate.noise == GateNoise::kGumbel ? noisy : plain);
    if (gate.top2_2nd_expert_sampling) {
      noisy[static_cast<std::size_t>(order[0])] = -1e300;
      order[1] = best_of(noisy)[0];
    }
    order.resize(k);
    const Tensor scores = torch::softmax(logits, 0);
    Tensor own = scores.index_select(0, torch::tensor(order, torch::kLong));
    if (k > 1) own = own / own.sum();
    chosen.push_back(order);
    weights.push_back(own * gate.router.scale);
  }
  if (gate.drop_tokens) {
    const auto capacity = static_cast<std::int64_t>(
        std::max(1.0, std::ceil(gate.capacity_factor * static_cast<double>(k) * static_cast<double>(x.size(0)) /
                                static_cast<double>(kMoeExperts))));
    if (gate.use_rts) {  // which go is experts_test.cpp's; here with which seed
      Tensor all = torch::empty({x.size(0), gate.router.choices}, torch::kLong);
      for (std::int64_t at = 0; at < all.numel(); ++at)
        all.data_ptr<std::int64_t>()[at] = chosen[static_cast<std::size_t>(at) / k][static_cast<std::size_t>(at) % k];
      const Tensor kept = libtorch::keep_within(all, torch::stack(weights), kMoeExperts, capacity,
                                                libtorch::KeepBy::kDraw, draw_seed(1, number, place));
      for (std::int64_t at = 0; at < all.numel(); ++at)
        chosen[static_cast<std::size_t>(at) / k][static_cast<std::size_t>(at) % k] = kept.data_ptr<std::int64_t>()[at];
    } else {
      std::vector<std::int64_t> taken(kMoeExperts, 0);
      for (std::size_t choice = 0; choice < k; ++choice) {
        for (std::vector<std::int64_t>& of_token : chosen) {
          if (++taken[static_cast<std::size_t>(of_token[choice])] > capacity) of_token[choice] = -1;
        }
      }
    }
  }
  std::vector<Tensor> rows;
  for (std::size_t token = 0; token < chosen.size(); ++token) {
    const Tensor row = x[static_cast<std::int64_t>(token)];
    Tensor sum = torch::zeros({kMoeWidth}, torch::kFloat64);
    for (std::size_t choice = 0; choice < k; ++choice) {
      const std::int64_t expert = chosen[token][choice];
      if (expert < 0) continue;
      const Tensor both = parameters["experts.gate_up"][expert].matmul(row);
      const Tensor hidden = torch::silu(both.narrow(0, 0, kMoeHidden)) * both.narrow(0, kMoeHidden, kMoeHidden);
      sum = sum + weights[token][static_cast<std::int64_t>(choice)] * parameters["experts.down"][expert].matmul(hidden);
    }
    if (one.residual) {
      const Tensor mix =
          torch::softmax(parameters["coefficient.weight"].matmul(row) + parameters["coefficient.bias"], 0);
      sum = sum * mix[0] + (parameters["residual.weight"].matmul(row) + parameters["residual.bias"]) * mix[1];
    }
    if (one.shared) sum = sum + parameters["shared.weight"].matmul(row) + parameters["shared.bias"];
    rows.push_back(sum);
  }
  return torch::stack(rows);
}

TEST(Moe, IsALoopOverTokens) {
  for (const MoeCase& one : moe_cases()) {
    SCOPED_TRACE(one.name);
    Moe moe = made_moe(one);
    const Tensor x = moe_numbers({kMoeTokens, kMoeWidth}, 90).requires_grad_();
    const Tensor target = moe_numbers({kMoeTokens, kMoeWidth}, 91);
    for (const std::uint64_t number : {1U, 2U}) {
      moe->router().set_place(static_cast<std::int64_t>(number));
      const libtorch::MoeOutput output = moe->forward(x);
      const Tensor expected = by_hand(one, moe, x, number, number);
      ASSERT_LE(distance(output.out, expected), 1e-12);
      EXPECT_EQ(output.counts.sum().item<std::int64_t>(), kMoeTokens * one.gate.router.choices);
      std::vector<Tensor> inputs = moe->parameters();
      inputs.push_back(x);
      const auto got = torch::autograd::grad({(output.out * target).sum()}, inputs, {}, {}, false, true);
      const auto wanted = torch::autograd::grad({(expected * target).sum()}, inputs, {}, {}, false, true);
      for (std::size_t at = 0; at < inputs.size(); ++at) {
        if (!wanted[at].defined()) continue;
        ASSERT_TRUE(got[at].defined()) << "gradient " << at;
        ASSERT_LE(distance(got[at], wanted[at]), 1e-11) << "gradient " << at;
      }
    }
    // Shapes and padding: two rows of tokens, of which the last are no tokens.
    moe->eval();
    const Tensor in_rows = x.detach().narrow(0, 0, 12).reshape({2, 6, kMoeWidth});
    const Tensor used = torch::arange(6).lt(4).expand({2, 6});
    const libtorch::MoeOutput evaluated = moe->forward(in_rows, used);
    EXPECT_EQ(evaluated.out.sizes(), in_rows.sizes());
    EXPECT_EQ(evaluated.counts.sum().item<std::int64_t>(), 8 * one.gate.router.choices);
    EXPECT_EQ(moe->forwards.item<std::int64_t>(), 2) << "an evaluation draws nothing";
  }
}

TEST(Moe, NamesAreThoseOfTheField) {
  MoeCase one{.name = "", .gate = gate_with(1, 1.0), .residual = true, .shared = true};
  one.gate.balance = BalanceBy::kBoth;
  one.gate.schedule = ChoiceSchedule{.first = 1, .last = 3, .steps = 2};
  const Moe moe = made_moe(one);
  std::vector<std::string> names;
  for (const auto& item : moe->named_parameters()) names.push_back(item.key());
  for (const auto& item : moe->named_buffers()) names.push_back(item.key());
  std::ranges::sort(names);
  const std::vector<std::string> expected{"balance_bias",    "coefficient.bias", "coefficient.weight", "experts.down",
                                          "experts.gate_up", "forwards",         "gate.weight",        "residual.bias",
                                          "residual.weight", "shared.bias",      "shared.weight",      "steps"};
  EXPECT_EQ(names, expected);
}

TEST(Moe, RanksAndForwardsDrawOtherNumbers) {
  const auto drawn = [](std::int64_t place, std::int64_t number, std::uint64_t seed) {
    GateOptions options = gate_with(2, 1.0);
    options.noise = GateNoise::kGumbel;
    options.drop_tokens = false;
    options.seed = seed;
    Gate gate(16, options);
    gate.set_place(place);
    return gate.forward({.x = torch::ones({64, 4}), .weight = torch::zeros({16, 4}), .number = number}).experts;
  };
  EXPECT_TRUE(torch::equal(drawn(0, 1, 3), drawn(0, 1, 3)));
  EXPECT_FALSE(torch::equal(drawn(0, 1, 3), drawn(1, 1, 3)));
  EXPECT_FALSE(torch::equal(drawn(0, 1, 3), drawn(0, 2, 3)));
  EXPECT_FALSE(torch::equal(drawn(0, 1, 3), drawn(0, 1, 4)));
}

// Gumbel noise on logits of softmax p makes each expert the first choice with probability p: 20,000 tokens.
TEST(Moe, NoiseDrawsFromTheSoftmax) {
  GateOptions options = gate_with(1, 1.0);
  options.noise = GateNoise::kGumbel;
  options.drop_tokens = false;
  Gate gate(4, options);
  constexpr std::int64_t kMany = 20'000;
  const Tensor p = torch::tensor({0.5, 0.3, 0.15, 0.05}, torch::kFloat64);
  const Tensor counts =
      gate.forward({.x = torch::ones({kMany, 1}, torch::kFloat64), .weight = p.log().reshape({4, 1})}).counts;
  for (std::int64_t expert = 0; expert < 4; ++expert) {
    const double part = p[expert].item<double>();
    const double deviation = std::sqrt(part * (1 - part) * kMany);
    EXPECT_NEAR(counts[expert].item<double>(), part * kMany, 4 * deviation) << expert;
  }
}

TEST(Moe, ABiasEvensOutASkewedLoad) {
  GateOptions options = gate_with(2, 1.0);
  options.drop_tokens = false;
  options.balance = BalanceBy::kBias;
  options.bias_rate = 0.02;
  options.router.score = RouterScore::kSigmoid;
  run_world(2, [&](const World& world) {
    at::set_num_threads(1);
    const RankGroup dp(world.mesh({{{"dp", 2}}}).axis("dp"));
    Gate gate(8, options);
    gate.balance_over({dp});
    Tensor bias = torch::zeros({8}, torch::kFloat64);
    Tensor weight = moe_numbers({8, 8}, 1) * 0.3;
    weight.select(1, 0) += torch::linspace(-1, 1, 8, torch::kFloat64);
    std::vector<double> entropies;
    for (std::int64_t step = 0; step < 40; ++step) {
      for (const std::int64_t micro : {0, 1}) {  // other tokens each time, all of which like the last experts
        const auto seed = static_cast<std::uint64_t>(100 * step + 10 * micro + dp.rank());
        Tensor x = moe_numbers({64, 8}, seed);
        x.select(1, 0).fill_(1.5);
        const Gated gated = gate.forward({.x = x, .weight = weight, .bias = bias, .number = step});
        require(gated.balance.item<double>() == 0.0 && !gated.balance.requires_grad(), "no loss");
      }
      double entropy = 0;
      for (const std::int64_t count : gate.load().chosen()) {
        const double part = static_cast<double>(count) / (2.0 * 2 * 2 * 64);
        if (count > 0) entropy -= part * std::log(part) / std::log(8.0);
      }
      entropies.push_back(entropy);
      gate.begin_step(bias);
    }
    require(entropies.front() < 0.85, "the load is skewed at first: " + std::to_string(entropies.front()));
    require(entropies.back() > 0.95, "and even at last: " + std::to_string(entropies.back()));
    const Tensor others = libtorch::all_reduce(bias, dp);
    require(torch::equal(others, bias * 2), "the bias is the same on all ranks");
  });
}

TEST(Balance, ABiasMovesByTheSignOfWhatIsMissing) {
  const Tensor bias = torch::tensor({0.0, 0.5, -0.25, 1.0}, torch::kFloat64);
  libtorch::update_balance_bias(bias, {4, 0, 9, 3}, 0.125);  // the mean is 4
  EXPECT_TRUE(torch::equal(bias, torch::tensor({0.0, 0.625, -0.375, 1.125}, torch::kFloat64))) << bias;
  libtorch::update_balance_bias(bias, {0, 0, 0, 0}, 0.125);
  EXPECT_EQ(bias[1].item<double>(), 0.625);
}

TEST(Balance, LossOfSequencesIsThatOfTheReport) {
  constexpr std::int64_t kTokens = 11;
  const std::vector<std::int64_t> lengths{4, 0, 7};
  const Tensor logits = moe_numbers({kTokens, 5}, 4).requires_grad_();
  const Tensor scores = torch::sigmoid(logits);
  const Routing routing = libtorch::route(logits, {.choices = 2, .score = RouterScore::kSigmoid});
  const Tensor got = libtorch::sequence_balance_loss(routing.scores, routing.experts, lengths);
  Tensor expected = torch::zeros({}, torch::kFloat64);
  std::int64_t begin = 0;
  for (const std::int64_t length : {4, 7}) {
    for (std::int64_t expert = 0; expert < 5; ++expert) {
      double f = 0;
      Tensor p = torch::zeros({}, torch::kFloat64);
      for (std::int64_t token = begin; token < begin + length; ++token) {
        const Tensor s = scores[token];
        const std::int64_t greater = s.gt(s[expert]).sum().item<std::int64_t>();
        if (greater < 2) f += 5.0 / (2.0 * static_cast<double>(length));  // eq. 18
        p = p + s[expert] / s.sum() / static_cast<double>(length);        // eq. 19, 20
      }
      expected = expected + f * p / 2;  // eq. 17, over two sequences
    }
    begin += length;
  }
  EXPECT_NEAR(got.item<double>(), expected.item<double>(), 1e-14);
  const Tensor gradient = torch::autograd::grad({got}, {logits}, {}, true)[0];
  EXPECT_LE(distance(gradient, torch::autograd::grad({expected}, {logits})[0]), 1e-14);
  const Tensor even = torch::full({4, 4}, 0.25, torch::kFloat64);
  EXPECT_DOUBLE_EQ(libtorch::sequence_balance_loss(even, torch::arange(4).reshape({4, 1}), {4}).item<double>(), 1.0);
  EXPECT_EQ(
      libtorch::sequence_balance_loss(even.narrow(0, 0, 0), torch::zeros({0, 1}, torch::kLong), {}).item<double>(),
      0.0);
}

TEST(Moe, ChoicesGrow) {
  std::vector<std::int64_t> choices;
  for (std::int64_t step = 0; step < 8; ++step) choices.push_back(libtorch::choices_at(step, 6, 2, 5));
  EXPECT_EQ(choices, (std::vector<std::int64_t>{2, 2, 3, 3, 4, 4, 5, 5}));
  MoeCase one{.name = "", .gate = gate_with(1, 1.0)};
  one.gate.drop_tokens = false;
  one.gate.schedule = ChoiceSchedule{.first = 1, .last = 4, .steps = 3};
  Moe moe = made_moe(one);
  for (const std::int64_t k : {1, 2, 3, 4, 4}) {
    EXPECT_EQ(moe->forward(moe_numbers({5, kMoeWidth}, 1)).counts.sum().item<std::int64_t>(), 5 * k);
    moe->begin_step();
  }
  EXPECT_NE(error_of(ErrorCode::kUsage, [&] { moe->router().set_choices(2); }).find("schedule"), std::string::npos);
  Gate gate(4, gate_with(1, 1.0));
  gate.set_choices(3);
  EXPECT_EQ(gate.choices(), 3);
  EXPECT_NE(error_of(ErrorCode::kUsage, [&] { gate.set_choices(5); }).find("1 to 4"), std::string::npos);
}

TEST(Moe, AFixedRouterIsDrawnAndNotTrained) {
  GatedExperts experts(moe_numbers({4, 6, 50}, 1), moe_numbers({4, 50, 3}, 2));
  const MoeOptions options{.width = 50, .num_experts = 4, .gate = gate_with(1, 1.0), .fixed_router = true};
  const Moe moe(options, libtorch::experts_module(experts));
  EXPECT_FALSE(moe->gate->weight.requires_grad());
  EXPECT_TRUE(torch::equal(moe->gate->weight, libtorch::fixed_router_weight(4, 50, kMoeSeed)));
  EXPECT_FALSE(torch::equal(moe->gate->weight, libtorch::fixed_router_weight(4, 50, kMoeSeed + 1)));
  const double bound = 1 / std::sqrt(50.0);
  EXPECT_LE(moe->gate->weight.abs().max().item<double>(), bound);
  EXPECT_NEAR(moe->gate->weight.std().item<double>(), bound / std::sqrt(3.0), 0.1 * bound);
}

TEST(Moe, ARuleOfTheCallersChooses) {
  GateOptions options = gate_with(2, 1.0);
  options.drop_tokens = false;
  options.rule = [](const Tensor& logits, const libtorch::RouterOptions& router) {
    Routing routing = libtorch::route(logits, router);
    routing.experts = routing.experts.masked_fill(routing.weights.lt(0.4), -1);  // a token may have one expert
    return routing;
  };
  Gate gate(4, options);
  const Gated gated = gate.forward({.x = moe_numbers({30, kMoeWidth}, 1), .weight = moe_numbers({4, kMoeWidth}, 2)});
  EXPECT_TRUE(torch::equal(gated.experts.lt(0), gated.weights.lt(0.4)));
  EXPECT_LT(gated.counts.sum().item<std::int64_t>(), 60);
  options.rule = [](const Tensor& logits, const libtorch::RouterOptions&) {
    return Routing{.experts = logits.argmax(-1), .weights = logits, .scores = logits};
  };
  Gate wrong(4, options);
  const std::string text = error_of(ErrorCode::kUsage, [&] {
    (void)wrong.forward({.x = moe_numbers({30, kMoeWidth}, 1), .weight = moe_numbers({4, kMoeWidth}, 2)});
  });
  EXPECT_NE(text.find("[30, k]"), std::string::npos) << text;
}

TEST(Moe, BadOptionsAreRefusedByName) {
  const auto message = [](const std::function<void(GateOptions&)>& spoil) {
    return error_of(ErrorCode::kUsage, [&] {
      GateOptions options = gate_with(2, 1.0);
      spoil(options);
      (void)Gate(4, options);
    });
  };
  EXPECT_NE(message([](GateOptions& one) { one.router.choices = 5; }).find("1 to 4"), std::string::npos);
  EXPECT_NE(message([](GateOptions& one) { one.capacity_factor = 0; }).find("above 0"), std::string::npos);
  EXPECT_NE(message([](GateOptions& one) { one.schedule = ChoiceSchedule{.first = 3, .last = 2}; }).find("3 to 2"),
            std::string::npos);
  const std::string noise = message([](GateOptions& one) {
    one.noise = GateNoise::kGumbel;
    one.router.score = RouterScore::kSigmoid;
  });
  EXPECT_NE(noise.find("softmax"), std::string::npos) << noise;
  Gate gate(4, gate_with(2, 1.0));
  const Tensor x = moe_numbers({3, kMoeWidth}, 1);
  EXPECT_NE(error_of(ErrorCode::kUsage, [&] { (void)gate.forward({.x = x, .weight = x}); }).find("[4, 6]"),
            std::string::npos);
  const auto usage = [](const std::function<void()>& call) { return error_of(ErrorCode::kUsage, call); };
  EXPECT_NE(usage([] {
              libtorch::update_balance_bias(torch::zeros({2}, torch::kBFloat16), {1, 2}, 0.1);
            }).find("float32 or float64"),
            std::string::npos);
  EXPECT_NE(usage([&] {
              (void)libtorch::sequence_balance_loss(x, torch::zeros({3, 1}, torch::kLong), {2});
            }).find("3 in all"),
            std::string::npos);
}

}  // namespace
}  // namespace zeroth::test
