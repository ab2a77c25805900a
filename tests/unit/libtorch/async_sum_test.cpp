// Sums that are started and taken later, and products in pieces whose sums overlap.
#include "libtorch/parallel/sum_slots.h"
#include "support/error_of.h"
#include "support/torch_ranks.h"

#include <zeroth/comm/mesh.h>
#include <zeroth/comm/received.h>
#include <zeroth/libtorch/async_sum.h>
#include <zeroth/libtorch/collectives.h>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

using libtorch::PendingSum;
using libtorch::RankGroup;
using torch::Tensor;

Tensor drawn(std::vector<std::int64_t> shape, std::uint64_t seed, torch::ScalarType dtype = torch::kFloat64) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn(shape, generator, torch::kFloat64).to(dtype);
}

RankReport try_on_ranks(int size, const std::function<void(const RankGroup& tp)>& body) {
  return try_world(size, [&](const World& world) {
    at::set_num_threads(1);
    const Mesh mesh = world.mesh({{{"tp", size}}});
    body(RankGroup(mesh.axis("tp")));
  });
}

void on_group(int size, const std::function<void(const RankGroup& tp)>& body) {
  try_on_ranks(size, body).require_ok();
}

TEST(AsyncSum, HasTheBitsOfTheSumThatWaits) {
  for (const int size : {1, 2, 3}) {
    on_group(size, [](const RankGroup& tp) {
      const auto seed = static_cast<std::uint64_t>(tp.rank());
      for (const auto dtype : {torch::kFloat64, torch::kFloat32, torch::kBFloat16, torch::kFloat16}) {
        for (const std::int64_t rows : {0, 1, 700}) {  // none, some, more than the first slots hold
          const Tensor x = drawn({rows, 5}, seed, dtype).t().requires_grad_();
          const PendingSum pending = libtorch::reduce_from_group_async(x, tp);
          const Tensor beside = libtorch::all_reduce(x.detach() * 2, tp);  // another call meanwhile
          const Tensor sum = pending.wait();
          require(torch::equal(sum, libtorch::reduce_from_group(x.detach(), tp)), "bits");
          require(torch::equal(beside, libtorch::reduce_from_group(x.detach() * 2, tp)), "the call beside");
          require(pending.wait().is_same(sum), "the same tensor");
          const Tensor gradient = drawn({5, rows}, 9, dtype);
          sum.backward(gradient);
          require(torch::equal(x.grad(), gradient), "gradient");
        }
      }
      const Tensor counts = torch::tensor({1, 2, 3}) * (tp.rank() + 1);
      require(
          torch::equal(libtorch::reduce_from_group_async(counts, tp).wait(), libtorch::reduce_from_group(counts, tp)),
          "integers");
    });
  }
}

TEST(AsyncSum, ManyAreUnderWayAndAreTakenInAnyOrder) {
  on_group(3, [](const RankGroup& tp) {
    for (int turn = 0; turn < 3; ++turn) {
      std::vector<PendingSum> pending;
      for (int index = 0; index < 5; ++index)
        pending.push_back(libtorch::reduce_from_group_async(torch::full({4}, tp.rank() + 10.0 * index), tp));
      std::rotate(pending.begin(), pending.begin() + turn, pending.end());
      for (int index = 0; index < 5; ++index) {
        const Tensor sum = pending[static_cast<std::size_t>(index)].wait();
        require(torch::equal(sum, torch::full({4}, 3 + 30.0 * ((index + turn) % 5))), "sum");
      }
    }
    reset_received(tp.communicator());
    (void)libtorch::reduce_from_group_async(torch::ones({100}), tp).wait();
    require(received_bytes(tp.communicator()) == 2 * 400, "the parts of the others");
  });
}

TEST(AsyncSum, AStartWaitsForNobody) {
  on_group(2, [](const RankGroup& tp) {
    (void)libtorch::reduce_from_group_async(torch::ones({8}), tp).wait();
    (void)libtorch::reduce_from_group_async(torch::ones({8}), tp).wait();  // both slots are there
    (void)libtorch::all_reduce(torch::ones({1}), tp);
    if (tp.rank() == 0) {
      const PendingSum pending = libtorch::reduce_from_group_async(torch::ones({8}), tp);
      tp.communicator().send(std::span<const std::int32_t>(std::vector<std::int32_t>{1}), 1);  // rank 1 starts after it
      require(torch::equal(pending.wait(), torch::full({8}, 2.0)), "sum");
    } else {
      std::vector<std::int32_t> token(1);
      tp.communicator().recv(std::span(token), 0);
      require(torch::equal(libtorch::reduce_from_group_async(torch::ones({8}), tp).wait(), torch::full({8}, 2.0)),
              "sum");
    }
  });
}

TEST(AsyncSum, MemoryOfSumsThatNobodyTakesIsUsedAgain) {
  on_group(2, [](const RankGroup& tp) {
    std::optional<PendingSum> kept;
    for (int turn = 0; turn < 20; ++turn) {
      PendingSum given_up = libtorch::reduce_from_group_async(torch::ones({8}), tp);
      if (turn == 10 && tp.rank() == 1) kept = given_up;  // by one rank only: not used again
      const Tensor sum = libtorch::reduce_from_group_async(torch::full({8}, turn + 0.5), tp).wait();
      require(torch::equal(sum, torch::full({8}, 2 * turn + 1.0)), "sum");
    }
    require(tp.sum_slots()->size() <= 4, std::to_string(tp.sum_slots()->size()) + " slots");
  });
}

TEST(AsyncSum, OtherShapesAreAMismatch) {
  const RankReport report = try_on_ranks(2, [](const RankGroup& tp) {
    const Tensor x = tp.rank() == 0 ? torch::ones({2, 3}) : torch::ones({3, 2});
    (void)libtorch::reduce_from_group_async(x, tp).wait();
  });
  ASSERT_FALSE(report.failures.empty());
  EXPECT_EQ(report.failures[0].code, ErrorCode::kMismatch) << report.text();
  EXPECT_NE(report.text().find("reduce_from_group_async, with rank"), std::string::npos) << report.text();
}

TEST(ChunkedLinear, IsTheSameForEveryNumberOfChunks) {
  for (const int size : {1, 2}) {
    on_group(size, [](const RankGroup& tp) {
      const auto seed = static_cast<std::uint64_t>(tp.rank());
      for (const bool exact : {true, false}) {
        const auto made = [&](std::vector<std::int64_t> shape, std::uint64_t number) {
          const Tensor values = drawn(std::move(shape), number + 10 * seed, torch::kFloat32);
          return (exact ? (values * 4).round() : values).detach();  // sums of small integers are exact
        };
        const Tensor weight = made({6, 16}, 2);
        const Tensor bias = (drawn({6}, 3, torch::kFloat32) * 4).round();
        Tensor expected;
        std::vector<Tensor> expected_gradients;
        for (const int chunks : {1, 2, 3, 4, 8, 100}) {
          const Tensor x = made({3, 7, 16}, 1).requires_grad_();
          const Tensor own = weight.clone().requires_grad_();
          const Tensor own_bias = bias.clone().requires_grad_();
          const Tensor out = libtorch::chunked_linear_reduce(x, own, own_bias, chunks, tp);
          out.backward(drawn({3, 7, 6}, 4, torch::kFloat32));
          const std::vector<Tensor> gradients{x.grad(), own.grad(), own_bias.grad()};
          if (chunks == 1) {
            expected = out;
            expected_gradients = gradients;
            const Tensor plain = libtorch::reduce_from_group(torch::linear(x, own), tp) + own_bias;
            require(torch::allclose(out, plain, 1e-6, 1e-5), "like reduce_from_group(linear)");
            continue;
          }
          const double bound = exact ? 0 : 2 * 16 * 6e-8 * 16 * 16 * tp.size();
          require((out - expected).abs().max().item<double>() <= bound, "value in " + std::to_string(chunks));
          for (std::size_t index = 0; index < gradients.size(); ++index)
            require(torch::equal(gradients[index], expected_gradients[index]), "gradients are not cut");
        }
      }
      const auto text = [&](const Tensor& x, int chunks) {
        return error_of(ErrorCode::kUsage,
                        [&] { (void)libtorch::chunked_linear_reduce(x, torch::ones({2, 4}), Tensor(), chunks, tp); });
      };
      require(text(torch::ones({2, 4}), 0).find("chunks of chunked_linear_reduce") != std::string::npos, "chunks");
      require(text(torch::ones({2, 3}), 1).find("x of chunked_linear_reduce") != std::string::npos, "features");
      require(libtorch::chunked_linear_reduce(torch::ones({0, 4}), torch::ones({2, 4}), Tensor(), 3, tp).sizes() ==
                  at::IntArrayRef({0, 2}),
              "no rows");
    });
  }
}

}  // namespace
}  // namespace zeroth::test
