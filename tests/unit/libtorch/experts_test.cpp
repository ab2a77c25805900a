// Experts on several ranks are like one process: values, gradients, boxes, bytes; and routers are what their headers
// say.
#include "support/error_of.h"
#include "support/thread_ranks.h"
#include "support/torch_ranks.h"

#include <zeroth/comm/mesh.h>
#include <zeroth/comm/received.h>
#include <zeroth/libtorch/collectives.h>
#include <zeroth/libtorch/experts.h>
#include <zeroth/libtorch/router.h>
#include <zeroth/parallel/slices.h>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using libtorch::ExpertLoad;
using libtorch::ExpertOptions;
using libtorch::ExpertRanks;
using libtorch::GatedExperts;
using libtorch::KeepBy;
using libtorch::RankGroup;
using libtorch::RouterOptions;
using libtorch::RouterScore;
using libtorch::Routing;
using libtorch::TokenExchange;
using torch::Tensor;

constexpr std::int64_t kExperts = 5;
constexpr std::int64_t kWidth = 6;
constexpr std::int64_t kHidden = 4;
constexpr std::int64_t kChoices = 2;

/// The same on every rank.
Tensor numbers(std::vector<std::int64_t> shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn(shape, generator, torch::kFloat64);
}

void require_near(const Tensor& got, const Tensor& expected, const std::string& what) {
  require(got.defined() && got.sizes() == expected.sizes(), what + " has another shape");
  const double apart = got.numel() == 0 ? 0 : (got - expected).abs().max().item<double>();
  require(apart <= 1e-12, what + " is off by " + std::to_string(apart));
}

void on_expert_ranks(int size, const std::function<void(const RankGroup& ep)>& body) {
  run_world(size, [&](const World& world) {
    at::set_num_threads(1);
    const Mesh mesh = world.mesh({{{"ep", size}}});
    body(RankGroup(mesh.axis("ep")));
  });
}

/// Tokens of one rank. Choices of a token are different experts, of which `without` is none; some are -1.
struct Tokens {
  Tokens(std::int64_t count, std::uint64_t seed, std::int64_t without = -1)
      : x(numbers({count, kWidth}, seed).requires_grad_()),
        weights(numbers({count, kChoices}, seed + 1).requires_grad_()),
        experts(torch::empty({count, kChoices}, torch::kLong)),
        target(numbers({count, kWidth}, seed + 2)) {
    std::uint64_t state = seed;
    auto* const out = experts.data_ptr<std::int64_t>();
    for (std::int64_t choice = 0; choice < count * kChoices; ++choice) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      out[choice] = static_cast<std::int64_t>((state >> 33U) % (kExperts + 1)) - 1;
      if (out[choice] == without) out[choice] = -1;
    }
  }
  Tensor x, weights, experts, target;
};

/// As a person would write it.
Tensor by_loops(const Tokens& tokens, const Tensor& gate_up, const Tensor& down) {
  std::vector<Tensor> rows;
  for (std::int64_t token = 0; token < tokens.x.size(0); ++token) {
    Tensor sum = torch::zeros({kWidth}, torch::kFloat64);
    for (std::int64_t choice = 0; choice < kChoices; ++choice) {
      const auto expert = tokens.experts[token][choice].item<std::int64_t>();
      if (expert < 0) continue;
      const Tensor both = gate_up[expert].matmul(tokens.x[token]);
      const Tensor hidden = torch::silu(both.narrow(0, 0, kHidden)) * both.narrow(0, kHidden, kHidden);
      sum = sum + tokens.weights[token][choice] * down[expert].matmul(hidden);
    }
    rows.push_back(sum);
  }
  return rows.empty() ? torch::zeros({0, kWidth}, torch::kFloat64) : torch::stack(rows);
}

/// Ranks of one memory, or `per_node` on each node.
void on_expert_nodes(int size, int per_node, const std::function<void(const RankGroup& ep)>& body) {
  if (per_node == 0) return on_expert_ranks(size, body);
  ThreadRanksOptions options{.transport = ThreadTransport::kLevels};
  options.comm.nodes = nodes_of_ranks(size, per_node);
  try_ranks(
      size,
      [&](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
        at::set_num_threads(1);
        body(RankGroup(Communicator(backend)));
      },
      options)
      .require_ok();
}

/// Rank r has the tokens r.
void try_experts(const std::vector<Tokens>& tokens, const std::string& what, const ExpertOptions& options = {},
                 int per_node = 0) {
  const Tensor gate_up = numbers({kExperts, 2 * kHidden, kWidth}, 1).requires_grad_();
  const Tensor down = numbers({kExperts, kWidth, kHidden}, 2).requires_grad_();
  std::vector<Tensor> expected;
  Tensor loss = torch::zeros({}, torch::kFloat64);
  for (const Tokens& own : tokens) {
    own.x.mutable_grad().reset();  // of the case before
    own.weights.mutable_grad().reset();
    expected.push_back(by_loops(own, gate_up, down));
    loss = loss + (expected.back() * own.target).sum();
  }
  if (loss.requires_grad()) loss.backward();
  const auto gradient_of = [](const Tensor& tensor) {
    return tensor.grad().defined() ? tensor.grad() : torch::zeros_like(tensor);
  };
  on_expert_nodes(static_cast<int>(tokens.size()), per_node, [&](const RankGroup& ep) {
    const Tokens& of_rank = tokens[static_cast<std::size_t>(ep.rank())];
    const Tensor x = of_rank.x.detach().clone().requires_grad_();
    const Tensor weights = of_rank.weights.detach().clone().requires_grad_();
    GatedExperts experts(gate_up.detach().clone(), down.detach().clone());
    experts->share(ExpertRanks(ep, options));
    const Tensor out = experts->forward(x, of_rank.experts, weights);
    require_near(out, expected[static_cast<std::size_t>(ep.rank())], what + ": output");
    (out * of_rank.target).sum().backward();
    require_near(x.grad(), gradient_of(of_rank.x), what + ": gradient of x");
    require_near(weights.grad(), gradient_of(of_rank.weights), what + ": gradient of the weights");
    const auto boxes = experts->boxes();
    require(boxes.size() == 2 && boxes[0].first == "gate_up" && boxes[1].first == "down", "names");
    for (const auto& [name, box] : boxes) {
      const Tensor& whole = name == "down" ? down : gate_up;
      const Tensor& part = name == "down" ? experts->down : experts->gate_up;
      const bool is_shared = ep.size() > 1;
      require(!is_shared || (box.axes.distinct == "ep" && whole.sizes() == at::IntArrayRef(box.logical_shape)), "box");
      const Tensor own = gradient_of(whole).narrow(0, is_shared ? box.offset[0] : 0, part.size(0));
      require_near(part.grad(), own, what + ": gradient of " + name);
    }
  });
}

TEST(Experts, OnRanksAreLikeOneProcess) {
  try_experts({Tokens(9, 10)}, "one rank");
  try_experts({Tokens(9, 10), Tokens(7, 20)}, "two ranks");
  try_experts({Tokens(9, 10), Tokens(1, 20), Tokens(30, 30)}, "three ranks");
  try_experts({Tokens(3, 10), Tokens(3, 20), Tokens(3, 30), Tokens(3, 40), Tokens(3, 50)}, "an expert a rank");
}

TEST(Experts, WithoutTokensOrWithoutUseAreLikeOneProcess) {
  try_experts({Tokens(0, 10), Tokens(7, 20)}, "a rank without tokens");
  try_experts({Tokens(0, 10), Tokens(0, 20)}, "no tokens");
  try_experts({Tokens(9, 10, 4), Tokens(9, 20, 4)}, "an expert that nobody uses");
  std::vector<Tokens> all{Tokens(9, 10), Tokens(5, 20)};
  for (Tokens& one : all) one.experts.fill_(3);
  try_experts(all, "all tokens to one expert");
  for (Tokens& one : all) one.experts.fill_(-1);
  try_experts(all, "no token to any expert");
  all[1].experts.fill_(0);
  try_experts(all, "the tokens of one rank to one expert");
}

TEST(Experts, BytesAreThoseOfTheFormula) {
  const std::vector<Tokens> tokens{Tokens(9, 10), Tokens(12, 20), Tokens(5, 30)};
  std::vector<std::vector<std::uint64_t>> rows(3, std::vector<std::uint64_t>(3, 0));  // [from][to]
  const std::vector<std::int64_t> sizes = slice_sizes(kExperts, 3);
  for (std::size_t from = 0; from < 3; ++from) {
    for (std::int64_t choice = 0; choice < tokens[from].experts.numel(); ++choice) {
      const auto expert = tokens[from].experts.flatten()[choice].item<std::int64_t>();
      if (expert < 0) continue;
      std::size_t to = 0;
      for (std::int64_t end = sizes[0]; expert >= end; end += sizes[to]) ++to;
      ++rows[from][to];
    }
  }
  on_expert_ranks(3, [&](const RankGroup& ep) {
    const auto own = static_cast<std::size_t>(ep.rank());
    GatedExperts experts(numbers({kExperts, 2 * kHidden, kWidth}, 1), numbers({kExperts, kWidth, kHidden}, 2));
    experts->share(ep);
    const Tensor x = tokens[own].x.detach().clone().requires_grad_();
    reset_received(ep.communicator());
    const Tensor out = experts->forward(x, tokens[own].experts, tokens[own].weights.detach());
    const std::uint64_t forward = received_bytes(ep.communicator());
    const std::uint64_t numbers_of_peers = 8 * 2 * (static_cast<std::uint64_t>(sizes[own]) + 2);
    std::uint64_t expected = numbers_of_peers;
    for (std::size_t peer = 0; peer < 3; ++peer) {
      if (peer != own) expected += 8 * kWidth * (rows[peer][own] + rows[own][peer]);
    }
    require(forward == expected, std::to_string(forward) + " bytes for " + std::to_string(expected));
    out.sum().backward();
    const std::uint64_t backward = received_bytes(ep.communicator()) - forward;
    require(backward == expected - numbers_of_peers, "bytes of the backward");
  });
}

TEST(Experts, TokensAndExpertsMeetInAnyWay) {
  std::vector<Tokens> uneven{Tokens(9, 10), Tokens(1, 20), Tokens(30, 30)};
  std::vector<Tokens> to_one{Tokens(9, 10), Tokens(5, 20), Tokens(0, 30), Tokens(7, 40)};
  for (Tokens& one : to_one) one.experts.fill_(3);
  struct Way {
    const char* name;
    ExpertOptions options;
    int per_node = 0;
  };
  const std::vector<Way> ways{
      {"two pieces", {.pieces = 2}},
      {"four pieces, of fewer experts", {.pieces = 4}},
      {"measured pieces", {.pieces = 0}},
      {"experts travel", {.meet = MeetAt::kTokens, .copies = kExperts}},
      {"one of them", {.meet = MeetAt::kTokens, .copies = 1, .pieces = 2}},
      {"no copy is allowed", {.meet = MeetAt::kTokens, .copies = 0}},
      {"balance", {.meet = MeetAt::kBalance, .copies = 1}},
      {"balance of many", {.meet = MeetAt::kBalance, .copies = 3, .pieces = 2}},
  };
  for (const Way& way : ways) {
    try_experts(uneven, c10::str("three ranks, ", way.name), way.options);
    try_experts(to_one, c10::str("all to one expert, ", way.name), way.options);
  }
  for (const Way& way : ways) {
    ExpertOptions hops = way.options;
    hops.two_hops = true;
    try_experts(to_one, c10::str("two hops, all to one expert, ", way.name), hops, 2);
    const std::vector<Tokens> four{Tokens(9, 10), Tokens(1, 20), Tokens(0, 30), Tokens(17, 40)};
    try_experts(four, c10::str("two hops, ", way.name), hops, 2);
  }
}

TEST(Experts, PiecesAndHopsChangeNoBit) {
  const std::vector<Tokens> tokens{Tokens(40, 10), Tokens(3, 20), Tokens(17, 30), Tokens(9, 40)};
  std::vector<std::vector<Tensor>> first(4);
  for (const ExpertOptions& options :
       {ExpertOptions{}, ExpertOptions{.pieces = 2}, ExpertOptions{.pieces = 3, .two_hops = true}}) {
    on_expert_nodes(4, 2, [&](const RankGroup& ep) {
      const Tokens& own = tokens[static_cast<std::size_t>(ep.rank())];
      const std::int64_t many = 9;
      GatedExperts experts(numbers({many, 2 * kHidden, kWidth}, 1).requires_grad_(),
                           numbers({many, kWidth, kHidden}, 2).requires_grad_());
      experts->gate_up.requires_grad_();
      experts->down.requires_grad_();
      experts->share(ExpertRanks(ep, options));
      const Tensor x = own.x.detach().clone().requires_grad_();
      const Tensor out = experts->forward(x, own.experts, own.weights.detach());
      (out * own.target).sum().backward();
      std::vector<Tensor>& wanted = first[static_cast<std::size_t>(ep.rank())];
      const std::vector<Tensor> got{out, x.grad(), experts->gate_up.grad(), experts->down.grad()};
      if (wanted.empty()) wanted = got;
      for (std::size_t at = 0; at < got.size(); ++at)
        require(torch::equal(got[at], wanted[at]), c10::str("number ", at, " with ", options.pieces, " pieces"));
    });
  }
}

TEST(Experts, CopiesTakeTheBytesAndTheMemoryThatTheyMay) {
  // All rows of four ranks choose the experts 0 and 1 of rank 0.
  std::vector<Tokens> tokens{Tokens(8, 10), Tokens(8, 20), Tokens(8, 30), Tokens(8, 40)};
  for (Tokens& one : tokens) {
    one.experts.select(1, 0).fill_(0);
    one.experts.select(1, 1).fill_(1);
  }
  on_expert_ranks(4, [&](const RankGroup& ep) {
    const auto at = static_cast<std::size_t>(ep.rank());
    const ExpertRanks ranks(ep, {.meet = MeetAt::kTokens, .copies = 2});
    GatedExperts experts(numbers({8, 2 * kHidden, kWidth}, 1), numbers({8, kWidth, kHidden}, 2));
    experts->gate_up.requires_grad_();
    experts->down.requires_grad_();
    experts->share(ranks);
    const auto bytes_of_forward = [&] {
      reset_received(ep.communicator());
      const Tensor out = experts->forward(tokens[at].x.detach(), tokens[at].experts, tokens[at].weights.detach());
      const std::uint64_t forward = received_bytes(ep.communicator());
      out.sum().backward();
      return std::pair{forward, received_bytes(ep.communicator()) - forward};
    };
    const std::uint64_t of_expert = 8 * 3 * kHidden * kWidth;
    const std::uint64_t all_numbers = 8 * (8 + 2) * 3;
    const bool is_owner = ep.rank() == 0;
    auto [forward, backward] = bytes_of_forward();
    require(forward == all_numbers + (is_owner ? 0 : 2 * of_expert), c10::str(forward, " bytes of chosen experts"));
    require(backward == (is_owner ? 3 * 2 * of_expert : 0), c10::str(backward, " bytes of their gradients"));
    // The same layout for another way: the change itself moves nothing.
    reset_received(ep.communicator());
    experts->set_options({.meet = MeetAt::kExperts});
    require(received_bytes(ep.communicator()) == 0, "a change of the way moves bytes");
    std::tie(forward, backward) = bytes_of_forward();
    const std::uint64_t rows = 8 * kWidth * 16;
    require(forward == 8 * (2 + 2) * 3 + (is_owner ? 3 * rows : rows), c10::str(forward, " bytes of rows"));
    const std::vector<std::vector<std::int64_t>> expected{{0, 1}, {2, 3}, {4, 5}, {6, 7}};
    const TokenExchange at_home(tokens[at].experts, 8, ExpertRanks(ep));
    require(at_home.experts_here() == expected[at], "experts of this rank");
    const TokenExchange even(tokens[at].experts, 8, ExpertRanks(ep, {.meet = MeetAt::kBalance, .copies = 2}));
    require(even.expert_of_row().size(0) == 16, "rows of a rank, where they are even");
    require(even.experts_here().size() <= 4, "more copies than may be");
    require(even.expert_of_row().lt(static_cast<std::int64_t>(even.experts_here().size())).all().item<bool>(),
            "places");
  });
}

TEST(Experts, AnExchangeKeepsTheWayThatItWasMadeWith) {
  on_expert_ranks(2, [&](const RankGroup& ep) {
    const Tokens own(12, 10 + static_cast<std::uint64_t>(ep.rank()));
    const Tensor parameter = numbers({ep.rank() == 0 ? 3 : 2, 1}, 1);
    const ExpertRanks ranks(ep, {.meet = MeetAt::kTokens, .copies = 5});
    const TokenExchange first(own.experts, kExperts, ranks);
    ranks.set_options({.pieces = 2});
    const TokenExchange second(own.experts, kExperts, ranks);
    for (const TokenExchange* exchange : {&first, &second}) {
      require(exchange->blocks_of_runs(parameter).size() == 2, "runs: copies and own ones; two of own ones");
      const auto itself = [](const Tensor& rows, const libtorch::ExpertRun& /*run*/) { return rows; };
      const Tensor out = exchange->through(own.x.detach(), own.weights.detach(), itself);
      const Tensor sums = own.weights.detach().masked_fill(own.experts.lt(0), 0).sum(1, true);
      require_near(out, own.x.detach() * sums, "rows that come back");
    }
  });
}

TEST(Experts, RanksAgreeOnTheirWay) {
  on_expert_ranks(2, [&](const RankGroup& ep) {
    const Tensor choices = torch::zeros({3, 2}, torch::kLong);
    const ExpertRanks ranks(ep, {.pieces = ep.rank() + 1});
    const std::string text = error_of(ErrorCode::kMismatch, [&] { (void)TokenExchange(choices, 4, ranks); });
    require(text.find("pieces=1") != std::string::npos && text.find("pieces=2") != std::string::npos, text);
    for (const ExpertOptions& wrong : {ExpertOptions{.copies = -1}, ExpertOptions{.pieces = -1}, {.pieces = 65}})
      (void)error_of(ErrorCode::kUsage, [&] { ranks.set_options(wrong); });
  });
  on_expert_ranks(3, [&](const RankGroup& ep) {
    const ExpertRanks ranks(ep, {.pieces = 0});
    std::vector<std::int64_t> tried;
    const Tensor x = numbers({12, kWidth}, 1);
    for (int call = 0; call < 14; ++call) {
      const TokenExchange exchange(torch::arange(12).remainder(11).unsqueeze(1), 11, ranks);
      tried.push_back(ranks.pieces());
      (void)exchange.through(x, torch::ones({12, 1}, torch::kFloat64),
                             [](const Tensor& rows, const libtorch::ExpertRun& /*run*/) { return rows; });
    }
    // Three experts on each rank: 4 pieces are no candidate. A time is told with the next exchange.
    require(tried[0] == 1 && tried[3] == 1 && tried[4] == 2 && tried[7] == 2, "trials come in their order");
    require(tried[8] == tried[13] && tried[13] <= 2, "then one stays");
    const Tensor all = libtorch::all_gather(torch::tensor(tried), 0, ep).view({3, -1});
    require(torch::equal(all[0], all[1]) && torch::equal(all[0], all[2]), "ranks have other numbers of pieces");
  });
}

TEST(Experts, AFewRowsOfManyGoThroughTheirMatrices) {
  const Tensor x = numbers({6, 3}, 1).requires_grad_();
  const Tensor weight = numbers({4, 2, 3}, 2).requires_grad_();
  const Tensor bias = numbers({4, 2}, 3).requires_grad_();
  const Tensor out = libtorch::grouped_linear(x, weight, bias, {2, 0, 3, 1});
  const std::vector<std::int64_t> expert_of{0, 0, 2, 2, 2, 3};
  std::vector<Tensor> rows;
  for (std::int64_t row = 0; row < 6; ++row) {
    const std::int64_t expert = expert_of[static_cast<std::size_t>(row)];
    rows.push_back(weight[expert].matmul(x[row]) + bias[expert]);
  }
  const Tensor expected = torch::stack(rows);
  require_near(out, expected, "rows");
  const Tensor target = numbers({6, 2}, 4);
  const auto got = torch::autograd::grad({(out * target).sum()}, {x, weight, bias});
  const auto wanted = torch::autograd::grad({(expected * target).sum()}, {x, weight, bias}, {}, /*retain_graph=*/true);
  for (std::size_t at = 0; at < 3; ++at) require_near(got[at], wanted[at], "gradient " + std::to_string(at));
  const auto twice = [&](const Tensor& rows_of) {
    const auto first = torch::autograd::grad({rows_of.pow(3).sum()}, {x, weight, bias}, {}, true, true);
    return torch::autograd::grad({first[0].square().sum() + first[1].square().sum() + first[2].square().sum()},
                                 {x, weight, bias});
  };
  const auto second = twice(libtorch::grouped_linear(x, weight, bias, {2, 0, 3, 1}));
  const auto expected_second = twice(expected);
  for (std::size_t at = 0; at < 3; ++at)
    require_near(second[at] / expected_second[at].abs().max(), expected_second[at] / expected_second[at].abs().max(),
                 "second gradient " + std::to_string(at));
  EXPECT_EQ(libtorch::grouped_linear(x.detach().narrow(0, 0, 0), weight, {}, {0, 0, 0, 0}).size(0), 0);
}

TEST(Experts, PartsOfAStackFillOneGradient) {
  const Tensor stacked = numbers({3, 2, 4}, 1).requires_grad_();
  const Tensor factors = numbers({3, 2, 4}, 2);
  const auto parts_of = [](const Tensor& whole) {
    libtorch::ExpertParts stack(whole);
    EXPECT_TRUE(stack.part(0).is_same(stack.part(0)));
    return std::vector<Tensor>{stack.part(0), stack.part(1), stack.part(2)};
  };
  const auto loss_of = [&](const std::vector<Tensor>& parts) {  // part 1 is not used, part 2 twice
    return (parts[0] * factors[0]).sum() + (parts[2].square() * factors[2]).sum() + parts[2].sum();
  };
  for (int backward = 0; backward < 2; ++backward) {  // nothing is left of the first
    const std::vector<Tensor> parts = parts_of(stacked);
    EXPECT_EQ(parts[1].data_ptr(), stacked[1].data_ptr());
    const Tensor loss = loss_of(parts);
    const Tensor wanted = torch::autograd::grad({loss_of(stacked.unbind())}, {stacked})[0];
    for (const bool keeps : {true, false})
      require_near(torch::autograd::grad({loss}, {stacked}, {}, keeps)[0], wanted, "gradient of the stack");
  }
  const auto twice = [&](const std::vector<Tensor>& parts) {
    const Tensor first = torch::autograd::grad({loss_of(parts)}, {stacked}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.pow(3).sum()}, {stacked})[0];
  };
  require_near(twice(parts_of(stacked)), twice(stacked.unbind()), "second gradient");
  // The gradients of parts that others hold are their own: the next backward does not write to them.
  const Tensor held = torch::autograd::grad({loss_of(parts_of(stacked))}, {stacked})[0];
  const Tensor before = held.clone();
  (void)torch::autograd::grad({2 * loss_of(parts_of(stacked))}, {stacked});
  EXPECT_TRUE(torch::equal(held, before));
  EXPECT_FALSE(parts_of(stacked.detach())[0].requires_grad());
  libtorch::ExpertParts parts(stacked);
  EXPECT_NE(error_of(ErrorCode::kUsage, [&] { (void)parts.part(3); }).find("0 to 2"), std::string::npos);
}

TEST(Experts, ProductsOfExpertsFillOneGradient) {
  const Tensor weight = numbers({3, 2, 4}, 1).requires_grad_();
  const Tensor bias = numbers({3, 2}, 2).requires_grad_();
  const Tensor x = numbers({5, 4}, 3).requires_grad_();
  for (const bool biased : {true, false}) {
    const auto loss_of = [&](bool placed) {  // expert 1 has no row, expert 0 two
      libtorch::ExpertMatrices matrices(weight, biased ? bias : Tensor());
      std::vector<Tensor> rows;
      std::int64_t first = 0;
      for (const auto& [expert, count] : {std::pair<std::int64_t, std::int64_t>{0, 2}, {1, 0}, {2, 3}}) {
        const Tensor part = x.narrow(0, first, count);
        const Tensor plain = part.matmul(weight[expert].t());
        rows.push_back(placed ? matrices.linear(part, expert) : (biased ? plain + bias[expert] : plain));
        first += count;
      }
      return torch::cat(rows).pow(3).sum();
    };
    const std::vector<Tensor> inputs = biased ? std::vector<Tensor>{x, weight, bias} : std::vector<Tensor>{x, weight};
    const Tensor loss = loss_of(true);
    const auto wanted = torch::autograd::grad({loss_of(false)}, inputs);
    for (const bool keeps : {true, false}) {
      const auto got = torch::autograd::grad({loss}, inputs, {}, keeps);
      for (std::size_t at = 0; at < inputs.size(); ++at)
        require_near(got[at] / wanted[at].abs().max(), wanted[at] / wanted[at].abs().max(), "gradient");
    }
    const auto twice = [&](bool placed) {
      const auto first = torch::autograd::grad({loss_of(placed)}, inputs, {}, true, /*create_graph=*/true);
      return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()}, {weight})[0];
    };
    const Tensor second = twice(false);
    require_near(twice(true) / second.abs().max(), second / second.abs().max(), "second gradient");
  }
  libtorch::ExpertMatrices matrices(weight, bias);
  (void)matrices.linear(x, 1);
  EXPECT_NE(error_of(ErrorCode::kUsage, [&] { (void)matrices.linear(x, 1); }).find("a second one"), std::string::npos);
  EXPECT_NE(error_of(ErrorCode::kUsage, [&] { (void)matrices.linear(x, 3); }).find("0 to 2"), std::string::npos);
}

TEST(Experts, BadInputIsRefusedByName) {
  const auto message = [](const std::function<void()>& call) { return error_of(ErrorCode::kUsage, call); };
  const Tensor choices = torch::zeros({3, 2}, torch::kLong);
  EXPECT_NE(message([&] { (void)TokenExchange(choices + 7, 5); }).find("7 for token 0"), std::string::npos);
  EXPECT_NE(message([&] { (void)TokenExchange(choices.to(torch::kFloat), 5); }).find("Float"), std::string::npos);
  const TokenExchange exchange(choices, 5);
  EXPECT_NE(message([&] { (void)exchange.send(numbers({4, 6}, 1)); }).find("[3, features]"), std::string::npos);
  EXPECT_NE(message([&] { (void)exchange.bring(numbers({4, 6}, 1), numbers({3, 2}, 1)); }).find("[6, features]"),
            std::string::npos);
  EXPECT_NE(message([&] { (void)exchange.bring(numbers({6, 6}, 1), numbers({3, 1}, 1)); }).find("[3, 2]"),
            std::string::npos);
  const Tensor weight = numbers({2, 4, 6}, 1);
  EXPECT_NE(message([&] { (void)libtorch::grouped_linear(numbers({3, 6}, 1), weight, {}, {1, 1}); }).find("[2, 6]"),
            std::string::npos);
  EXPECT_NE(message([&] { (void)libtorch::grouped_linear(numbers({3, 6}, 1), weight, {}, {4, -1}); }).find("-1"),
            std::string::npos);
  EXPECT_NE(message([&] { (void)GatedExperts(numbers({2, 8, 6}, 1), numbers({2, 6, 3}, 1)); }).find("[E, 2 F, D]"),
            std::string::npos);
  const Tensor logits = numbers({3, 6}, 1);
  EXPECT_NE(message([&] { (void)libtorch::route(logits, {.choices = 7}); }).find("1 to 6"), std::string::npos);
  EXPECT_NE(message([&] { (void)libtorch::route(logits, {.groups = 4}); }).find("4 groups"), std::string::npos);
  EXPECT_NE(message([&] { (void)libtorch::keep_within(choices, logits, 5, 1); }).find("[3, 6]"), std::string::npos);
  on_expert_ranks(3, [&](const RankGroup& ep) {
    const std::string text = message([&] { GatedExperts(numbers({2, 8, 6}, 1), numbers({2, 6, 4}, 1))->share(ep); });
    require(text.find("3 or more") != std::string::npos, text);
  });
}

TEST(Router, ChoosesAsWritten) {
  const Tensor logits = numbers({20, 8}, 3).requires_grad_();
  const Routing plain = libtorch::route(logits, {.choices = 3});
  const Tensor scores = torch::softmax(logits, -1);
  require_near(plain.scores, scores, "scores");
  for (std::int64_t token = 0; token < 20; ++token) {
    double sum = 0;
    for (std::int64_t choice = 0; choice < 3; ++choice)
      sum += scores[token][plain.experts[token][choice].item<std::int64_t>()].item<double>();
    std::vector<std::pair<double, std::int64_t>> sorted;
    for (std::int64_t expert = 0; expert < 8; ++expert)
      sorted.emplace_back(-scores[token][expert].item<double>(), expert);
    std::ranges::sort(sorted);
    for (std::int64_t choice = 0; choice < 3; ++choice) {
      const auto& [score, expert] = sorted[static_cast<std::size_t>(choice)];
      ASSERT_EQ(plain.experts[token][choice].item<std::int64_t>(), expert);
      ASSERT_NEAR(plain.weights[token][choice].item<double>(), -score / sum, 1e-15);
    }
  }
  // Equal scores: the lower number. A bias chooses, and is in no weight.
  const Routing equal = libtorch::route(torch::zeros({2, 4}, torch::kFloat64), {.choices = 2});
  EXPECT_TRUE(torch::equal(equal.experts, torch::tensor({{0, 1}, {0, 1}}, torch::kLong)));
  const Routing biased = libtorch::route(torch::zeros({1, 4}, torch::kFloat64),
                                         {.choices = 1,
                                          .score = RouterScore::kSigmoid,
                                          .renormalize = false,
                                          .scale = 2.5,
                                          .bias = torch::tensor({0.0, 0.0, 1.0, 0.5}, torch::kFloat64)});
  EXPECT_EQ(biased.experts.item<std::int64_t>(), 2);
  EXPECT_DOUBLE_EQ(biased.weights.item<double>(), 1.25);
}

/// A bias of float64 is left to torch's operators, one of float32 to the kernels.
TEST(Router, KernelsAreLikeTorchsOperators) {
  for (const auto dtype : {torch::kFloat64, torch::kFloat32, torch::kBFloat16}) {
    for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
      for (const bool renormalize : {true, false}) {
        RouterOptions options{
            .choices = 3, .score = score, .renormalize = renormalize, .scale = 1.5, .groups = 4, .groups_kept = 2};
        const auto routed = [&](const Tensor& logits, torch::ScalarType of_bias) {
          options.bias = (numbers({24}, 7) * 0.01).to(torch::kFloat).to(of_bias);
          return libtorch::route(logits, options);
        };
        const double tolerance = dtype == torch::kFloat64 ? 1e-13 : (dtype == torch::kFloat32 ? 1e-5 : 0.02);
        const auto require_close = [&](const Tensor& got, const Tensor& wanted, const char* what) {
          require(got.scalar_type() == wanted.scalar_type(), std::string(what) + ": dtype");
          const double apart = (got - wanted).abs().max().item<double>();
          require(apart <= tolerance, std::string(what) + " is off by " + std::to_string(apart));
        };
        const Tensor logits = numbers({301, 24}, 3).to(dtype).requires_grad_();
        const Tensor same = logits.detach().clone().requires_grad_();
        const Routing got = routed(logits, torch::kFloat32);
        const Routing wanted = routed(same, torch::kFloat64);
        EXPECT_TRUE(torch::equal(got.experts, wanted.experts));
        require_close(got.weights, wanted.weights, "weights");
        require_close(got.scores, wanted.scores, "scores");
        const Tensor of_weights = numbers({301, 3}, 4).to(got.weights.scalar_type());
        const Tensor of_experts = numbers({24}, 5).to(got.scores.scalar_type());
        const Tensor of_scores = numbers({301, 24}, 6).to(got.scores.scalar_type());
        const auto losses = [&](const Routing& routing) {
          return std::vector<Tensor>{(routing.weights * of_weights).sum(), (routing.scores.sum(0) * of_experts).sum(),
                                     (routing.scores * of_scores).sum(),
                                     (routing.weights * of_weights).sum() + (routing.scores * of_scores).sum()};
        };
        const std::vector<Tensor> of_kernels = losses(got);
        const std::vector<Tensor> of_operators = losses(wanted);
        for (std::size_t loss = 0; loss < of_kernels.size(); ++loss) {
          const Tensor one = torch::autograd::grad({of_kernels[loss]}, {logits}, {}, true)[0];
          const Tensor other = torch::autograd::grad({of_operators[loss]}, {same}, {}, true)[0];
          require_close(one, other, ("gradient of loss " + std::to_string(loss)).c_str());
        }
        if (dtype != torch::kFloat64) continue;
        const auto twice = [&](const Tensor& loss, const Tensor& from) {
          const Tensor first = torch::autograd::grad({loss.square()}, {from}, {}, true, /*create_graph=*/true)[0];
          return torch::autograd::grad({first.square().sum()}, {from})[0];
        };
        const Tensor second = twice(of_operators[3], same);
        require((twice(of_kernels[3], logits) - second).abs().max().item<double>() <=
                    1e-10 * second.abs().max().item<double>(),
                "gradient of a gradient");
      }
    }
  }
  EXPECT_EQ(libtorch::route(torch::zeros({0, 4}), {.choices = 2}).experts.sizes(), (at::IntArrayRef{0, 2}));
  // A bias that is not finite forbids an expert.
  const Tensor forbids = torch::tensor({0.F, -INFINITY, 0.F});
  EXPECT_TRUE(torch::equal(libtorch::route(torch::zeros({1, 3}), {.choices = 2, .bias = forbids}).experts,
                           torch::tensor({{0, 2}}, torch::kLong)));
}

TEST(Router, KeepsTheBestGroups) {
  // Groups {0, 1}, {2, 3}, {4, 5}: sums of two 0.9 + 0.0, 0.5 + 0.5, 0.6 + 0.1.
  const Tensor scores = torch::tensor({{0.9, 0.01, 0.5, 0.5, 0.6, 0.1}}, torch::kFloat64);
  const Routing routing = libtorch::route(
      torch::logit(scores), {.choices = 2, .score = RouterScore::kSigmoid, .groups = 3, .groups_kept = 1});
  EXPECT_TRUE(torch::equal(routing.experts, torch::tensor({{2, 3}}, torch::kLong))) << routing.experts;
  const Routing two = libtorch::route(torch::logit(scores),
                                      {.choices = 2, .score = RouterScore::kSigmoid, .groups = 3, .groups_kept = 2});
  EXPECT_TRUE(torch::equal(two.experts, torch::tensor({{0, 2}}, torch::kLong))) << two.experts;
}

TEST(Router, DropsWhatIsBeyondTheCapacity) {
  const Tensor experts = torch::tensor({{0, 1}, {0, 1}, {0, 1}, {1, 0}}, torch::kLong);
  const Tensor weights = torch::tensor({{.1, .9}, {.2, .8}, {.7, .3}, {.6, .4}}, torch::kFloat64);
  const auto kept = [&](KeepBy by, std::uint64_t seed = 0) {
    return libtorch::keep_within(experts, weights, 2, 2, by, seed);
  };
  // First choices go before second ones: expert 1 has that of token 3, and the second one of token 0.
  const Tensor by_position = torch::tensor({{0, 1}, {0, -1}, {-1, -1}, {1, -1}}, torch::kLong);
  EXPECT_TRUE(torch::equal(kept(KeepBy::kPosition), by_position)) << kept(KeepBy::kPosition);
  const Tensor by_weight = torch::tensor({{-1, 1}, {-1, 1}, {0, -1}, {-1, 0}}, torch::kLong);
  EXPECT_TRUE(torch::equal(kept(KeepBy::kWeight), by_weight)) << kept(KeepBy::kWeight);
  EXPECT_TRUE(torch::equal(kept(KeepBy::kDraw, 5), kept(KeepBy::kDraw, 5)));
  for (const KeepBy by : {KeepBy::kPosition, KeepBy::kWeight, KeepBy::kDraw}) {
    EXPECT_TRUE(torch::equal(libtorch::keep_within(experts, weights, 2, 4, by), experts));
    EXPECT_TRUE(libtorch::keep_within(experts, weights, 2, 0, by).eq(-1).all().item<bool>());
  }
  EXPECT_EQ(libtorch::expert_capacity(10, 4, 2, 1.25, 4), 7);
  EXPECT_EQ(libtorch::expert_capacity(10, 4, 1, 1.0, 4), 4);
  EXPECT_EQ(libtorch::expert_capacity(0, 4, 1, 1.0, 0), 0);
}

// Random token selection: each position is kept as often as any other. 64 positions, 16 kept, 2,000 seeds: chi-square
// with 63 degrees of freedom is below 120 but for one of 100,000 draws, and the seeds are fixed.
TEST(Router, DrawsAreUniformOverPositions) {
  constexpr int kTokens = 64;
  constexpr int kKept = 16;
  constexpr int kSeeds = 2'000;
  const Tensor experts = torch::zeros({kTokens, 1}, torch::kLong);
  const Tensor weights = torch::ones({kTokens, 1}, torch::kFloat64);
  std::array<int, kTokens> times{};
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Tensor kept = libtorch::keep_within(experts, weights, 1, kKept, KeepBy::kDraw, seed);
    ASSERT_EQ(kept.eq(0).sum().item<std::int64_t>(), kKept);
    for (int token = 0; token < kTokens; ++token)
      times[static_cast<std::size_t>(token)] += kept.data_ptr<std::int64_t>()[token] == 0 ? 1 : 0;
  }
  const double expected = static_cast<double>(kSeeds) * kKept / kTokens;
  // Of a fixed number kept a seed: counts vary less than independent ones, by (N - n) / (N - 1).
  const double spread = expected * (kTokens - kKept) / (kTokens - 1.0);
  double chi_square = 0;
  for (const int count : times) chi_square += (count - expected) * (count - expected) / spread;
  EXPECT_LT(chi_square, 120.0);
  EXPECT_GT(chi_square, 30.0) << "too even for draws";
}

TEST(Router, TheBalanceIsThatOfAllRanksAndMicroBatches) {
  // Rank r has 3 + r tokens in each of two micro-batches. One process has those of both ranks.
  const auto logits_of = [](int rank, int micro) {
    return numbers({3 + rank, 4}, static_cast<std::uint64_t>(10 * rank + micro));
  };
  std::vector<double> losses;
  std::vector<Tensor> gradients;
  ExpertLoad whole(4);
  for (int micro = 0; micro < 2; ++micro) {
    const Tensor logits = torch::cat({logits_of(0, micro), logits_of(1, micro)}).requires_grad_();
    const Routing routing = libtorch::route(logits, {.choices = 2});
    whole.add(routing.experts, {});
    const Tensor loss = whole.balance_loss(routing.scores);
    loss.backward();
    losses.push_back(loss.item<double>());
    gradients.push_back(logits.grad());
  }
  on_expert_ranks(2, [&](const RankGroup& ranks) {
    ExpertLoad load(4);
    for (std::size_t micro = 0; micro < 2; ++micro) {
      const Tensor logits = logits_of(ranks.rank(), static_cast<int>(micro)).requires_grad_();
      const Routing routing = libtorch::route(logits, {.choices = 2});
      reset_received(ranks.communicator());
      load.add(routing.experts, {ranks});
      require(received_bytes(ranks.communicator()) == 8 * (4 + 1), "one sum of E + 1 numbers");
      const Tensor loss = load.balance_loss(routing.scores);
      loss.backward();
      // An engine takes the mean over ranks.
      Tensor mean = loss.detach().clone().reshape({1});
      mean = libtorch::all_reduce(mean, ranks) / 2;
      require(std::abs(mean.item<double>() - losses[micro]) < 1e-12, "the loss");
      require_near(logits.grad() / 2, gradients[micro].narrow(0, 3 * ranks.rank(), 3 + ranks.rank()), "gradient");
    }
    require(load.chosen() == whole.chosen(), "counts");
    load.begin_step();
    require(load.chosen() == std::vector<std::int64_t>(4, 0), "a new step");
  });
  ExpertLoad even(4);
  even.add(torch::arange(4).reshape({4, 1}), {});
  EXPECT_DOUBLE_EQ(even.balance_loss(torch::full({4, 4}, 0.25, torch::kFloat64)).item<double>(), 1.0);
}

TEST(Router, ZLossIsTheMeanSquareOfTheLogsumexp) {
  const Tensor logits = numbers({5, 4}, 1);
  EXPECT_NEAR(libtorch::router_z_loss(logits).item<double>(), logits.exp().sum(-1).log().square().mean().item<double>(),
              1e-14);
  EXPECT_EQ(libtorch::router_z_loss(logits.narrow(0, 0, 0)).item<double>(), 0.0);
}

}  // namespace
}  // namespace zeroth::test
