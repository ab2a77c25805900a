// A region that is computed twice makes its calls between ranks once.
#include "support/torch_ranks.h"

#include <zeroth/base/error.h>
#include <zeroth/comm/mesh.h>
#include <zeroth/comm/received.h>
#include <zeroth/libtorch/async_sum.h>
#include <zeroth/libtorch/collectives.h>
#include <zeroth/libtorch/experts.h>
#include <zeroth/libtorch/kept_calls.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <optional>

namespace zeroth::test {
namespace {

using libtorch::KeptCalls;
using libtorch::RankGroup;
using torch::Tensor;

void on_ranks_of_ep(int size, const std::function<void(const RankGroup& ep)>& body) {
  try_world(size, [&](const World& world) {
    at::set_num_threads(1);
    const Mesh mesh = world.mesh({{{"ep", size}}});
    body(RankGroup(mesh.axis("ep")));
  }).require_ok();
}

TEST(KeptCalls, ARecomputeOfExpertsHasTheSameBitsAndMakesNoCall) {
  on_ranks_of_ep(2, [](const RankGroup& ep) {
    torch::manual_seed(static_cast<std::uint64_t>(ep.rank()));
    const Tensor x = torch::randn({5, 3}, torch::kFloat64).requires_grad_();
    const Tensor experts = torch::randint(0, 4, {5, 2}, torch::kLong);
    const Tensor weights = torch::rand({5, 2}, torch::kFloat64);
    const auto layer = [&] {
      const libtorch::TokenExchange exchange(experts, 4, ep);
      return libtorch::reduce_from_group_async(exchange.bring(exchange.send(x).tanh(), weights).sin(), ep).wait();
    };
    const KeptCalls kept;
    Tensor first, again;
    {
      const auto scope = kept.record();
      first = layer();
    }
    require(kept.size() == 4 && kept.bytes() > 0, "counts, rows there and back, and the sum");
    require(!libtorch::hands_out_calls(), "outside");
    const std::uint64_t before = received_bytes(ep.communicator());
    {
      const auto scope = kept.hand_out();
      require(libtorch::hands_out_calls(), "inside");
      again = layer();
    }
    require(received_bytes(ep.communicator()) == before, "no call");
    require(kept.size() == 0 && kept.bytes() == 0, "nothing is held");
    require(torch::equal(first, again), "bits");
    const Tensor gradient = torch::autograd::grad({first.sum()}, {x})[0];
    require(torch::equal(torch::autograd::grad({again.sum()}, {x})[0], gradient), "the same backward");
    {
      const auto scope = kept.hand_out();  // a second time: calls are made
      again = layer();
    }
    require(torch::equal(first, again) && received_bytes(ep.communicator()) > before, "made again");
  });
}

TEST(KeptCalls, AnotherCallIsRefusedBeforeARankIsCalled) {
  on_ranks_of_ep(2, [](const RankGroup& ep) {
    const Tensor x = torch::ones({3}, torch::kFloat64);
    const KeptCalls kept;
    {
      const auto scope = kept.record();
      (void)libtorch::all_reduce(x, ep);
    }
    std::optional<ErrorCode> code;
    try {
      const auto scope = kept.hand_out();
      (void)libtorch::all_gather(x, 0, ep);
    } catch (const Error& error) {
      code = error.code();
    }
    require(code == ErrorCode::kMismatch, "refused");
    require(kept.size() == 0, "dropped");
    require(libtorch::all_reduce(x, ep)[0].item<double>() == 2, "the group goes on");
  });
}

}  // namespace
}  // namespace zeroth::test
