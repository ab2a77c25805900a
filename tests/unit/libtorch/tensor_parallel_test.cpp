// Layers that ranks share are like one process: values, gradients, boxes, and bytes.
#include "support/error_of.h"
#include "support/torch_ranks.h"

#include <zeroth/comm/mesh.h>
#include <zeroth/comm/received.h>
#include <zeroth/libtorch/tensor_parallel.h>
#include <zeroth/parallel/slices.h>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using libtorch::ColumnLinear;
using libtorch::LinearCut;
using libtorch::LossReduction;
using libtorch::ParameterBox;
using libtorch::RankGroup;
using libtorch::RowLinear;
using libtorch::VocabEmbedding;
using torch::Tensor;

/// The same on every rank.
Tensor values(std::vector<std::int64_t> shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn(shape, generator, torch::kFloat64);
}

void require_close(const Tensor& got, const Tensor& expected, const std::string& what, double bound = 1e-12) {
  require(got.defined() && got.sizes() == expected.sizes(), what + " has another shape");
  const double apart = got.numel() == 0 ? 0 : (got - expected).abs().max().item<double>();
  require(apart <= bound, what + " is off by " + std::to_string(apart));
}

Tensor part_in(const Tensor& whole, const ParameterBox& box, const Tensor& part) {
  if (box.logical_shape.empty()) return whole;
  require(whole.sizes() == at::IntArrayRef(box.logical_shape), "logical shape");
  Tensor found = whole;
  for (std::int64_t dim = 0; dim < whole.dim(); ++dim)
    found = found.narrow(dim, box.offset[static_cast<std::size_t>(dim)], part.size(dim));
  return found;
}

void on_ranks(int size, const std::function<void(const RankGroup& tp)>& body) {
  run_world(size, [&](const World& world) {
    at::set_num_threads(1);
    const Mesh mesh = world.mesh({{{"tp", size}}});
    body(RankGroup(mesh.axis("tp")));
  });
}

/// Two layers on one process, with the gradients of a scalar.
struct Reference {
  explicit Reference(std::int64_t inner)
      : x(values({2, 8, 6}, 1).requires_grad_()),
        column(values({inner, 6}, 2).requires_grad_()),
        column_bias(values({inner}, 3).requires_grad_()),
        row(values({6, inner}, 4).requires_grad_()),
        row_bias(values({6}, 5).requires_grad_()) {
    out = torch::linear(torch::tanh(torch::linear(x, column, column_bias)), row, row_bias);
    (out * values({2, 8, 6}, 6)).sum().backward();
  }
  Tensor x, column, column_bias, row, row_bias, out;
};

TEST(TensorParallel, APairOfLinearLayersIsLikeOneProcess) {
  for (const int size : {1, 2, 4}) {
    for (const std::int64_t inner : {8, 7, 3}) {  // also slices of two sizes, and none
      const Reference reference(inner);
      on_ranks(size, [&](const RankGroup& tp) {
        const ColumnLinear column(reference.column, reference.column_bias, tp);
        const RowLinear row(reference.row, reference.row_bias, tp);
        const Tensor x = reference.x.detach().clone().requires_grad_();
        reset_received(tp.communicator());
        const Tensor out = row->forward(torch::tanh(column->forward(x)));
        require_close(out, reference.out, "output");
        (out * values({2, 8, 6}, 6)).sum().backward();
        // One sum of the output in forward, one of the input's gradient in backward: 768 bytes in one phase.
        const auto received = received_by_kind(tp.communicator());
        const auto others = static_cast<std::uint64_t>(size - 1);
        require(received.size() == (size == 1 ? 0 : 1), "only sums");
        require(size == 1 || received.at("all_reduce") == TrafficRow{.calls = 2, .bytes = 2 * 768 * others}, "bytes");
        require_close(x.grad(), reference.x.grad(), "gradient of x");
        for (const auto& [name, box] : column->boxes()) {
          const Tensor& part = name == "weight" ? column->weight : column->bias;
          const Tensor& whole = name == "weight" ? reference.column : reference.column_bias;
          require_close(part.grad(), part_in(whole.grad(), box, part), "gradient of column " + name);
          require(size == 1 || box.axes.distinct == "tp", "axis");
        }
        require_close(row->weight.grad(), part_in(reference.row.grad(), row->boxes()[0].second, row->weight), "row");
        require_close(row->bias.grad(), reference.row_bias.grad(), "row bias");
        require(row->boxes().size() == 1, "the bias is whole");
      });
    }
  }
}

TEST(TensorParallel, GatheredOutputsAndWholeInputsAreLikeOneProcess) {
  const Reference reference(7);
  on_ranks(4, [&](const RankGroup& tp) {
    const ColumnLinear column(reference.column, reference.column_bias, tp, LinearCut{.gather_output = true});
    const RowLinear row(reference.row, reference.row_bias, tp, LinearCut{.input_is_whole = true});
    const Tensor x = reference.x.detach().clone().requires_grad_();
    const Tensor inner = column->forward(x);
    require_close(inner, torch::linear(reference.x, reference.column, reference.column_bias), "gathered");
    const Tensor out = row->forward(torch::tanh(inner));
    require_close(out, reference.out, "output");
    (out * values({2, 8, 6}, 6)).sum().backward();
    require_close(x.grad(), reference.x.grad(), "gradient of x");
    require_close(column->weight.grad(), part_in(reference.column.grad(), column->boxes()[0].second, column->weight),
                  "column");
    require_close(row->weight.grad(), part_in(reference.row.grad(), row->boxes()[0].second, row->weight), "row");
  });
}

/// Blocks of the outputs that ranks share, each alike, are those of one process.
TEST(TensorParallel, BlocksOfOneMatrixAreSharedEach) {
  const Tensor weight = values({3 * 5, 4}, 1).requires_grad_();  // query, key and value
  const Tensor bias = values({3 * 5}, 2).requires_grad_();
  const Tensor x = values({2, 4}, 3);
  const Tensor expected = torch::linear(x, weight, bias).unflatten(-1, {3, 5});
  expected.sin().sum().backward();
  for (const int size : {1, 2, 4}) {  // 5 in slices of 2, 1, 1, 1
    on_ranks(size, [&](const RankGroup& tp) {
      const std::vector<std::int64_t> sizes = slice_sizes(5, size);
      const auto own = [&](const Tensor& blocks, std::int64_t dim) {
        return blocks.split_with_sizes(sizes, dim)[static_cast<std::size_t>(tp.rank())];
      };
      const ColumnLinear column(weight, bias, tp, LinearCut{.parts = 3});
      const Tensor out = column->forward(x).unflatten(-1, {3, sizes[static_cast<std::size_t>(tp.rank())]});
      require_close(out, own(expected, -1), "output");
      out.sin().sum().backward();
      require_close(column->weight.grad(), own(weight.grad().unflatten(0, {3, 5}), 1).flatten(0, 1), "weight");
      require_close(column->bias.grad(), own(bias.grad().unflatten(0, {3, 5}), 1).flatten(0, 1), "bias");
      for (const auto& [name, box] : column->boxes()) {
        require(size == 1 || (box.parts == 3 && box.parts_dim == 0 && box.logical_shape[0] == 15), "box of " + name);
        const auto before = sizes.begin() + tp.rank();
        require(size == 1 || box.offset[0] == std::accumulate(sizes.begin(), before, std::int64_t{0}), "offset");
      }
    });
  }
}

TEST(TensorParallel, SlicesOfTheSequenceAreLikeOneProcess) {
  const Reference reference(8);
  for (const auto& [size, again] : {std::pair(2, false), {2, true}, {4, true}, {3, false}, {3, true}}) {
    on_ranks(size, [&, size = size, again = again](const RankGroup& tp) {
      const std::vector<std::int64_t> sizes = slice_sizes(8, size);  // 8 in slices of 3, 3 and 2
      const LinearCut cut{.sequence_dim = 1, .gathers_again = again, .sequence_sizes = sizes};
      const ColumnLinear column(reference.column, reference.column_bias, tp, cut);
      const RowLinear row(reference.row, reference.row_bias, tp, cut);
      const auto own = [&](const Tensor& whole) {
        return whole.split_with_sizes(sizes, 1)[static_cast<std::size_t>(tp.rank())];
      };
      const Tensor x = own(reference.x).detach().clone().requires_grad_();
      reset_received(tp.communicator());
      const Tensor out = row->forward(torch::tanh(column->forward(x)));
      require_close(out, own(reference.out), "output");
      (out * own(values({2, 8, 6}, 6))).sum().backward();
      const auto received = received_by_kind(tp.communicator());
      const std::uint64_t gathers = again ? 3 : 2;
      require(received.at("all_gather").calls == gathers && received.at("reduce_scatter").calls == 2, "pairs of calls");
      const auto ranks = static_cast<std::uint64_t>(size);
      require(size == 3 || received_bytes(tp.communicator()) == (gathers + 2) * 768 * (ranks - 1) / ranks, "bytes");
      require_close(x.grad(), own(reference.x.grad()), "gradient of x");
      require_close(column->weight.grad(), part_in(reference.column.grad(), column->boxes()[0].second, column->weight),
                    "column");
      const auto boxes = row->boxes();
      require(boxes.size() == 2 && boxes[1].second.axes.summed == std::vector<std::string>{"tp"}, "the bias is summed");
      require_close(libtorch::all_reduce(row->bias.grad(), tp), reference.row_bias.grad(), "row bias");
    });
  }
}

TEST(TensorParallel, SizesDrawTheLayerOfOneProcess) {
  torch::manual_seed(5);
  const torch::nn::Linear plain(torch::nn::LinearOptions(6, 7));
  const torch::nn::Embedding table(torch::nn::EmbeddingOptions(9, 4));
  std::vector<Tensor> weights(2);
  std::vector<Tensor> rows(2);
  for (int rank = 0; rank < 2; ++rank) {  // torch's generator is the process's: one rank after the other
    on_ranks(2, [&](const RankGroup& tp) {
      if (tp.rank() != rank) return;
      torch::manual_seed(5);
      const ColumnLinear column(libtorch::LinearSizes{.in_features = 6, .out_features = 7}, tp);
      const VocabEmbedding embedding(libtorch::EmbeddingSizes{.vocabulary = 9, .features = 4}, tp);
      weights[static_cast<std::size_t>(rank)] = torch::cat({column->weight, column->bias.unsqueeze(1)}, 1).detach();
      rows[static_cast<std::size_t>(rank)] = embedding->weight.detach();
    });
  }
  EXPECT_TRUE(torch::equal(torch::cat(weights), torch::cat({plain->weight, plain->bias.unsqueeze(1)}, 1)));
  EXPECT_TRUE(torch::equal(torch::cat(rows), table->weight));
}

TEST(TensorParallel, AnEmbeddingIsLikeOneProcess) {
  for (const int size : {1, 2, 4}) {
    for (const std::int64_t vocabulary : {10, 3}) {
      const Tensor table = values({vocabulary, 5}, 1).requires_grad_();
      const Tensor indices = torch::tensor({0, 2, 1, 1, 0, 2, 2, 1}).reshape({2, 4});
      const Tensor expected = torch::embedding(table, indices);
      (expected * values({2, 4, 5}, 2)).sum().backward();
      on_ranks(size, [&](const RankGroup& tp) {
        const VocabEmbedding embedding(table, tp);
        const Tensor out = embedding->forward(indices);
        require(torch::equal(out, expected), "rows of the table, to the bit");
        (out * values({2, 4, 5}, 2)).sum().backward();
        require_close(embedding->weight.grad(), part_in(table.grad(), embedding->boxes()[0].second, embedding->weight),
                      "gradient");
        // The same with slices of the sequence.
        const VocabEmbedding sliced(table, tp, LinearCut{.sequence_dim = 1});
        const auto own = [&](const Tensor& whole) {
          return whole.split_with_sizes(slice_sizes(4, size), 1)[static_cast<std::size_t>(tp.rank())];
        };
        const Tensor part = sliced->forward(indices);
        require(torch::equal(part, own(expected)), "own slice of the sequence");
        (part * own(values({2, 4, 5}, 2))).sum().backward();
        require_close(sliced->weight.grad(), part_in(table.grad(), sliced->boxes()[0].second, sliced->weight), "rows");
      });
    }
  }
}

TEST(TensorParallel, TheLossOfASharedVocabularyIsThatOfOneProcess) {
  const Tensor targets = torch::tensor({3, 0, -7, 10, 5, 10, -7, 6}).reshape({2, 4});
  for (const int size : {1, 2, 4}) {
    for (const auto reduction : {LossReduction::kMean, LossReduction::kSum, LossReduction::kNone}) {
      const Tensor logits = (values({2, 4, 11}, 1) * 30).requires_grad_();
      const auto expected_of = [&](const Tensor& whole) {
        const auto options = torch::nn::functional::CrossEntropyFuncOptions().ignore_index(-7).reduction(torch::kNone);
        const Tensor each = torch::nn::functional::cross_entropy(whole.reshape({8, 11}), targets.reshape({8}), options);
        if (reduction == LossReduction::kNone) return each.reshape({2, 4});
        return reduction == LossReduction::kSum ? each.sum() : each.sum() / 6;
      };
      const Tensor expected = expected_of(logits);
      const Tensor weights = reduction == LossReduction::kNone ? values({2, 4}, 2) : values({}, 2);
      (expected * weights).sum().backward();
      on_ranks(size, [&](const RankGroup& tp) {
        const std::vector<std::int64_t> sizes = slice_sizes(11, size);
        const auto own = [&](const Tensor& whole) {
          return whole.split_with_sizes(sizes, 2)[static_cast<std::size_t>(tp.rank())];
        };
        const libtorch::VocabLossOptions options{.ignore_index = -7, .reduction = reduction, .vocab_sizes = sizes};
        const Tensor part = own(logits).detach().clone().requires_grad_();
        reset_received(tp.communicator());
        const Tensor loss = libtorch::vocab_cross_entropy(part, targets, tp, options);
        require_close(loss, expected, "loss");
        (loss * weights).sum().backward();
        require_close(part.grad(), own(logits.grad()), "gradient");
        // 8 maxima, then 8 sums and 8 logits of targets, of 8 bytes; nothing in backward.
        const auto others = static_cast<std::uint64_t>(size - 1);
        const auto received = received_by_kind(tp.communicator());
        require(size == 1 || received.at("all_reduce") == TrafficRow{.calls = 2, .bytes = 24 * 8 * others}, "bytes");
        require(received.size() == (size == 1 ? 0U : 1U), "no logits move");
        // 16-bit logits are computed in float32.
        const Tensor half = own(logits).detach().to(torch::kBFloat16).requires_grad_();
        const Tensor half_loss = libtorch::vocab_cross_entropy(half, targets, tp, options);
        const Tensor rounded = logits.detach().to(torch::kBFloat16).to(torch::kFloat64);
        require(half_loss.scalar_type() == torch::kFloat32, "dtype");
        require_close(half_loss.to(torch::kFloat64), expected_of(rounded), "loss of bfloat16", 1e-3);
        half_loss.sum().backward();
        require(half.grad().scalar_type() == torch::kBFloat16, "dtype of the gradient");
      });
    }
  }
}

TEST(TensorParallel, BadInputIsRefusedByName) {
  on_ranks(2, [](const RankGroup& tp) {
    const auto text = [](const auto& call) { return error_of(ErrorCode::kUsage, call); };
    const auto has = [](const std::string& all, const std::string& part) {
      require(all.find(part) != std::string::npos, all + "\nhas not " + part);
    };
    const Tensor weight = values({4, 6}, 1);
    has(text([&] { ColumnLinear(values({4}, 1), Tensor(), tp); }), "weight; expected: [out_features, in_features]");
    has(text([&] { RowLinear(weight, values({6}, 1), tp); }), "bias; expected: [4]");
    has(text([&] { ColumnLinear(libtorch::LinearSizes{}, tp); }), "LinearSizes");
    has(text([&] { ColumnLinear(weight, Tensor(), tp, LinearCut{.parts = 3}); }),
        "LinearCut::parts; expected: a divisor of 4, without gather_output; got: 3");
    has(text([&] { ColumnLinear(weight, Tensor(), tp, LinearCut{.parts = 2, .gather_output = true}); }),
        "got: 2 with gather_output");
    has(text([&] { (void)ColumnLinear(weight, Tensor(), tp)->forward(values({2, 5}, 1)); }),
        "ColumnLinear; expected: [..., 6]; got: [2, 5]");
    has(text([&] { (void)RowLinear(weight, Tensor(), tp)->forward(values({2, 6}, 1)); }), "RowLinear");
    const VocabEmbedding embedding(weight, tp);
    has(text([&] { (void)embedding->forward(torch::tensor({0, 4})); }), "expected: 0 to 3; got: 4");
    has(text([&] { (void)embedding->forward(torch::tensor({0.5})); }), "expected: int64 or int32");
    has(text([&] { (void)libtorch::vocab_cross_entropy(weight, torch::tensor({0, 1, 2, 12}), tp); }),
        "expected: 0 to 11; got: 12");
    has(text([&] { (void)libtorch::vocab_cross_entropy(weight, torch::tensor({0, 1}), tp); }),
        "targets of vocab_cross_entropy; expected: int64 of shape [4]");
    has(text([&] {
          (void)libtorch::vocab_cross_entropy(weight, torch::tensor({0, 1, 2, 3}), tp, {.vocab_sizes = {{1, 1}}});
        }),
        "vocab_sizes of vocab_cross_entropy");
    const Tensor logits = values({1, 3}, 1).requires_grad_();
    const Tensor loss = libtorch::vocab_cross_entropy(logits, torch::tensor({1}), tp);
    has(text([&] { (void)torch::autograd::grad({loss}, {logits}, {}, true, true); }), "no gradient of this gradient");
  });
}

}  // namespace
}  // namespace zeroth::test
