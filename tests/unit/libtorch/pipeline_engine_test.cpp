// PipelineEngine: a list of layers in the stages of a pipeline trains as one process does.
#include "libtorch/runtime.h"
#include "support/torch_ranks.h"

#include <zeroth/comm/mesh.h>
#include <zeroth/engine/settings.h>
#include <zeroth/libtorch/collectives.h>
#include <zeroth/libtorch/pipeline_engine.h>
#include <zeroth/libtorch/tensor_parallel.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using libtorch::Layer;
using libtorch::MicroBatch;
using libtorch::PipelineEngine;
using libtorch::RankGroup;
using libtorch::Tensors;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::Tensor;

constexpr std::int64_t kVocabulary = 11;
constexpr std::int64_t kFeatures = 8;
constexpr std::int64_t kHidden = 12;
constexpr int kSteps = 3;
constexpr std::int64_t kIgnored = 4;  ///< a target that does not count, for heads of cross_entropy_head()

Tensor values(std::vector<std::int64_t> shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn(shape, generator, torch::kFloat64) * 0.4;
}

/// Two tensors in, two out. The ranks of a group share the matrices.
struct BlockImpl : torch::nn::Module {
  BlockImpl(std::uint64_t seed, const RankGroup& tp)
      : up(register_module(
            "up", libtorch::ColumnLinear(values({kHidden, kFeatures}, seed), values({kHidden}, seed + 1), tp))),
        down(register_module(
            "down", libtorch::RowLinear(values({kFeatures, kHidden}, seed + 2), values({kFeatures}, seed + 3), tp))) {
    scale = register_parameter("scale", torch::full({}, 0.7, torch::kFloat64));  // no box of it is empty
  }
  std::pair<Tensor, Tensor> forward(const Tensor& h, const Tensor& kept) {
    const Tensor next = h + down(torch::tanh(up(h))) * scale;
    return {next, kept + next.tanh()};
  }
  libtorch::ColumnLinear up;
  libtorch::RowLinear down;
  Tensor scale{};
};
TORCH_MODULE(Block);

enum class Head : std::uint8_t {
  kTied,    ///< the embedding's matrix
  kOwn,     ///< a matrix of its own
  kShared,  ///< cross_entropy_head()
};

struct TextImpl : torch::nn::Module {
  TextImpl(int layers, const RankGroup& tp, Head kind = Head::kTied, std::optional<RankGroup> sequence = std::nullopt)
      : kind_(kind), sequence_(std::move(sequence)) {
    embedding->weight.set_data(values({kVocabulary, kFeatures}, 1));
    register_module("embedding", embedding);
    for (int block = 0; block < layers; ++block) {
      blocks.emplace_back(Block(static_cast<std::uint64_t>(10 * block + 10), tp));
      register_module("block" + std::to_string(block), blocks.back());
    }
    register_module("norm", norm);
    norm->to(torch::kFloat64);
    head = embedding->weight;
    if (kind == Head::kOwn) head = register_parameter("head", values({kVocabulary, kFeatures}, 2));
    if (kind != Head::kShared) return;
    torch::nn::Linear linear(kFeatures, kVocabulary);
    linear->weight.set_data(values({kVocabulary, kFeatures}, 2));
    linear->bias.set_data(values({kVocabulary}, 3));
    shared = libtorch::Unit<torch::nn::Linear>(linear);
    register_module("shared", shared);
  }
  std::vector<Layer> layers() {
    std::vector<Layer> list;
    list.push_back({.name = "embedding",
                    .forward = [table = embedding](const Tensors& in, const MicroBatch&) mutable -> Tensors {
                      const Tensor h = table(in[0]);
                      return {h, h * 0.5};
                    },
                    .modules = {embedding.ptr()}});
    for (auto& block : blocks) list.push_back(libtorch::layer("block" + std::to_string(list.size() - 1), block));
    if (kind_ == Head::kShared) {
      list.push_back({.name = "norm",
                      .forward = [norm = norm](const Tensors& in, const MicroBatch&) mutable -> Tensors {
                        return {norm(in[0] + in[1])};
                      },
                      .modules = {norm.ptr()}});
      list.push_back(libtorch::cross_entropy_head("head", shared, kIgnored, sequence_));
      return list;
    }
    list.push_back(
        {.name = "head",
         .forward = [norm = norm, weight = head](const Tensors& in, const MicroBatch& batch) mutable -> Tensors {
           const Tensor logits = torch::linear(norm(in[0] + in[1]), weight);
           if (batch.targets.empty()) return {logits, logits.argmax(-1)};
           return {torch::cross_entropy_loss(logits.flatten(0, 1), batch.targets[0].flatten())};
         },
         .modules = {norm.ptr()},
         .parameters = {head}});
    return list;
  }
  torch::nn::Embedding embedding{kVocabulary, kFeatures};
  std::vector<libtorch::Unit<Block>> blocks{};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({kFeatures})};
  Tensor head{};
  libtorch::Unit<torch::nn::Linear> shared{nullptr};

 private:
  Head kind_;
  std::optional<RankGroup> sequence_;
};
TORCH_MODULE(Text);

/// Sequences of another length in each micro-batch.
MicroBatch micro_batch(int step, int number) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(100 * step + number + 7));
  const Tensor tokens = torch::randint(kVocabulary, {2, 4 + number % 3}, generator, torch::kInt64);
  return {.inputs = {tokens.narrow(1, 0, tokens.size(1) - 1)}, .targets = {tokens.narrow(1, 1, tokens.size(1) - 1)}};
}

struct Trained {
  std::vector<double> losses{};
  std::vector<double> norms{};
  std::map<std::string, Tensor> weights{};
  double held_out = 0;
  double weighted = 0;  ///< of two micro-batches, the first three times
  Tensor logits{};
};

std::string plain(std::string name) {
  const std::string inner = std::string(libtorch::kInnerName) + ".";
  if (const std::size_t at = name.find(inner); at != std::string::npos) name.erase(at, inner.size());
  return name;
}

Tensors run(const std::vector<Layer>& layers, const MicroBatch& batch) {
  Tensors at = batch.inputs;
  for (const Layer& layer : layers) at = layer.forward(at, batch);
  return at;
}

/// What the model is after the training.
void look_at(Text& model, const std::vector<Layer>& layers, Trained& trained) {
  const torch::NoGradGuard no_grad;
  for (int number = 0; number < 5; ++number)
    trained.held_out += run(layers, micro_batch(50, number))[0].item<double>() / 5;
  for (int number = 0; number < 2; ++number)
    trained.weighted += run(layers, micro_batch(50, number))[0].item<double>() * (number == 0 ? 0.75 : 0.25);
  trained.logits = run(layers, {.inputs = micro_batch(60, 0).inputs})[0];
  for (const auto& item : model->named_parameters()) trained.weights[plain(item.key())] = item.value().detach().clone();
}

/// One process, torch's autograd and optimizer.
Trained trained_plainly(int blocks, int micro_batches, Head head = Head::kTied) {
  Trained trained;
  run_world(1, [&](const World& world) {
    at::set_num_threads(1);
    const Mesh mesh = world.mesh({{{"tp", 1}}});
    Text model(blocks, RankGroup(mesh.axis("tp")), head);
    const std::vector<Layer> layers = model->layers();
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < kSteps; ++step) {
      double sum = 0;
      sgd.zero_grad();
      for (int number = 0; number < micro_batches; ++number) {
        const Tensor loss = run(layers, micro_batch(step, number))[0] / micro_batches;
        loss.backward();
        sum += loss.item<double>();
      }
      trained.losses.push_back(sum);
      trained.norms.push_back(torch::nn::utils::clip_grad_norm_(model->parameters(), 0.5));
      sgd.step();
    }
    look_at(model, layers, trained);
  });
  return trained;
}

/// What a stage is given, without its history; the gradients of floating-point tensors are wanted.
Tensors received(const Tensors& sent) {
  Tensors given;
  for (const Tensor& one : sent) given.push_back(one.detach().set_requires_grad(one.is_floating_point()));
  return given;
}

Tensors gradients_of(const Tensors& given) {
  Tensors gradients;
  for (const Tensor& one : given) gradients.push_back(one.grad());
  return gradients;
}

/// One process, with late gradients by hand: in step t stage k of K goes back through what step t - (K - 1 - k) gave
/// it, with its weights of now and the gradients that stage k + 1 had for it in step t - 1.
Trained trained_late(const std::vector<int>& bounds, int micro_batches) {
  constexpr int kLateSteps = 5;
  Trained trained;
  run_world(1, [&](const World& world) {
    at::set_num_threads(1);
    const Mesh mesh = world.mesh({{{"tp", 1}}});
    Text model(4, RankGroup(mesh.axis("tp")));
    const std::vector<Layer> layers = model->layers();
    const int last = static_cast<int>(bounds.size()) - 2;
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const auto run_stage = [&](int stage, Tensors values, const MicroBatch& batch) {
      for (int layer = bounds[static_cast<std::size_t>(stage)]; layer < bounds[static_cast<std::size_t>(stage) + 1];
           ++layer)
        values = layers[static_cast<std::size_t>(layer)].forward(values, batch);
      return values;
    };
    using Place = std::array<int, 3>;  // stage, step, micro-batch
    std::map<Place, Tensors> kept;
    std::map<Place, Tensors> sent;
    for (int step = 0; step < kLateSteps; ++step) {
      double sum = 0;
      sgd.zero_grad();
      for (int number = 0; number < micro_batches; ++number) {
        const MicroBatch batch = micro_batch(step, number);
        Tensors given = batch.inputs;
        for (int stage = 0; stage < last; ++stage) {
          kept[{stage, step, number}] = given;
          given = received(run_stage(stage, given, batch));
        }
        const Tensor loss = run_stage(last, given, batch)[0] / micro_batches;
        loss.backward();
        sum += loss.item<double>();
        sent[{last, step, number}] = gradients_of(given);
      }
      for (int stage = 0; stage < last; ++stage) {
        const int then = step - (last - stage);
        for (int number = 0; then >= 0 && number < micro_batches; ++number) {
          const Tensors given = received(kept.at({stage, then, number}));
          const Tensors made = run_stage(stage, given, micro_batch(then, number));
          torch::autograd::backward(made, sent.at({stage + 1, then, number}));
          sent[{stage, then, number}] = gradients_of(given);
        }
      }
      trained.losses.push_back(sum);
      trained.norms.push_back(torch::nn::utils::clip_grad_norm_(model->parameters(), 0.5));
      sgd.step();
    }
    look_at(model, layers, trained);
  });
  return trained;
}

struct Row {
  std::string schedule = "1f1b";
  int pp = 2;
  int dp = 1;
  int tp = 1;
  int sp = 1;  ///< ranks with parts of the sequences, for a head of cross_entropy_head()
  int micro = 4;
  int stage = 1;
  std::string unshard = "micro_batch";
  std::string split = "balanced";
  std::vector<int> bounds{};
  bool recompute = false;
  bool files = false;        ///< what a recompute needs rests there
  std::string vocabulary{};  ///< of a model with a head of cross_entropy_head()
  [[nodiscard]] Head head() const { return vocabulary.empty() ? Head::kTied : Head::kShared; }
};

Config config_of(const Row& row) {
  Config config;
  config.gradient_accumulation_steps = row.micro;
  config.gradient_clipping = 0.5;
  config.optimizer.type = "SGD";
  config.optimizer.lr = 0.1;
  config.optimizer.momentum = 0.9;
  config.zero.stage = row.stage;
  config.mesh.pp = row.pp;
  config.mesh.tp = row.tp;
  config.mesh.sp = row.sp;
  config.pipeline.schedule = row.schedule;
  config.pipeline.unshard = row.unshard;
  config.pipeline.split = row.split;
  config.pipeline.recompute = row.recompute;
  if (!row.vocabulary.empty()) config.pipeline.vocabulary = row.vocabulary;
  if (row.files) {
    config.activations.device = "nvme";
    config.activations.nvme_path = testing::TempDir();
    config.activations.min_bytes = 1;
  }
  config.runtime.threads = 1;
  config.runtime.timeout_ms = 60'000;
  return config;
}

Mesh mesh_for(const Config& config, const World& world) {
  return world.mesh(mesh_of(config, world.size()), make_comm_options(config, world.size()));
}

libtorch::EngineOptions quiet() {
  return {.log_level = LogLevel::kOff};
}

/// The micro-batches of a data rank.
std::vector<MicroBatch> own_batches(int step, int data_rank, int count) {
  std::vector<MicroBatch> batches;
  for (int number = 0; number < count; ++number) batches.push_back(micro_batch(step, data_rank * count + number));
  return batches;
}

/// Of dim 1, the rank's part.
Tensor slice_of(const Tensor& whole, const std::optional<RankGroup>& sequence) {
  return sequence ? libtorch::split_to_group(whole, 1, *sequence) : whole;
}

void take_slice(MicroBatch& batch, const std::optional<RankGroup>& sequence) {
  const torch::NoGradGuard no_grad;
  for (Tensor& one : batch.inputs) one = slice_of(one, sequence);
  for (Tensor& one : batch.targets) one = slice_of(one, sequence);
}

void require_close(double got, double expected, const std::string& what) {
  require(std::abs(got - expected) <= 1e-12, what + ": " + std::to_string(got) + ", not " + std::to_string(expected));
}

void require_close(const Tensor& got, const Tensor& expected, const std::string& what) {
  require(got.sizes() == expected.sizes(), what + " has another shape");
  require((got - expected).abs().max().item<double>() <= 1e-12, what + " has other values");
}

void require_own_parameters(Text& model, const PipelineEngine& engine, int stage) {
  const int blocks = static_cast<int>(model->blocks.size());
  for (int block = 0; block < blocks; ++block) {
    const auto chunk = std::ranges::upper_bound(engine.bounds(), block + 1) - engine.bounds().begin() - 1;
    const bool here = engine.program().rank_of_chunk[static_cast<std::size_t>(chunk)] == stage;
    auto& inner = *model->blocks[static_cast<std::size_t>(block)]->inner();
    require((inner.up->weight.numel() > 0) == here, "weights of block " + std::to_string(block));
    require(inner.scale.numel() == 1, "a scalar is on all stages");
  }
}

void train_in_stages(const Row& row, const Trained& expected, const World& world) {
  at::set_num_threads(1);
  const Config config = config_of(row);
  const MeshPlace place(mesh_of(config, world.size()), world.rank(), world.size());
  const Mesh mesh = mesh_for(config, world);
  const auto sequence = row.sp > 1 ? std::optional(RankGroup(mesh.axis("sp"))) : std::nullopt;
  Text model(4, RankGroup(mesh.axis("tp")), row.head(), sequence);
  const auto own_batches = [&](int step, int data_rank, int count) {
    std::vector<MicroBatch> batches = test::own_batches(step, data_rank, count);
    for (MicroBatch& batch : batches) take_slice(batch, sequence);
    return batches;
  };
  PipelineEngine engine(model.ptr(), model->layers(), config, world, quiet(), row.bounds);
  require_own_parameters(model, engine, engine.pipeline().stage());
  const int data_rank = place.coordinate("dp");
  for (std::size_t step = 0; step < expected.losses.size(); ++step) {
    const std::vector<MicroBatch> batches = own_batches(static_cast<int>(step), data_rank, row.micro);
    const auto [result, loss] = engine.train_batch(batches);
    require(result.committed, result.reason);
    require_close(loss, expected.losses[step], "loss");
    require_close(result.grad_norm, expected.norms[step], "norm");
    for (const MicroBatch& batch : batches) batch.inputs[0].zero_();  // as the memory of a loader
  }
  if (row.files) {
    const TransferReport report = engine.runtime()->core().transfer_report();
    require(report.rows.size() == 1 && report.rows[0].set == "activations", "activations move");
    require((report.rows[0].all.writes > 0) == (world.rank() > 0), "inputs go away, and chunk 0 has none");
    require(report.rows[0].all.reads == report.rows[0].all.writes, "and come back");
  }
  if (row.dp == 1) require_close(engine.eval_batch(own_batches(50, 0, 5)), expected.held_out, "held-out loss");
  require_close(engine.eval_batch(own_batches(50, 0, 2), {3, 1}), expected.weighted, "weighted loss");
  MicroBatch alone{.inputs = micro_batch(60, 0).inputs};
  take_slice(alone, sequence);
  const Tensors outputs = engine.outputs(alone);
  const bool two = row.head() == Head::kTied;
  require(outputs.size() == (two ? 2 : 1), "what the last layer returns");
  require(!two || torch::equal(outputs[1], expected.logits.argmax(-1)), "the other thing that the last layer returns");
  require_close(outputs[0], slice_of(expected.logits, sequence), "logits");
  for (const auto& [name, weight] : expected.weights) require_close(engine.full(name), weight, name);
}

void expect_stages_train_as(const Trained& expected, const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    SCOPED_TRACE(row.schedule + ", " + std::to_string(row.pp) + " stages, ZeRO-" + std::to_string(row.stage) + " " +
                 row.vocabulary);
    const RankReport report = try_world(row.pp * row.dp * row.tp * row.sp,
                                        [&](const World& world) { train_in_stages(row, expected, world); });
    EXPECT_TRUE(report.ok()) << report.text();
  }
}

TEST(PipelineEngine, StagesTrainAsOneProcessDoes) {
  const Trained four = trained_plainly(4, 4);
  const std::vector<Row> rows{
      {},
      {.schedule = "zb-h1", .stage = 3},
      {.schedule = "interleaved", .stage = 2, .split = "uniform"},
      {.schedule = "zb-v", .stage = 3, .unshard = "step", .bounds = {0, 2, 3, 4, 6}},
      {.pp = 3, .stage = 0, .split = "parameters"},
      {.pp = 1, .stage = 3},
      {.dp = 2, .micro = 2, .stage = 3},
      {.schedule = "zb-h1", .tp = 2, .stage = 2},
      {.schedule = "zb-h1", .stage = 3, .recompute = true},
      {.schedule = "gpipe", .stage = 2, .recompute = true, .files = true},
  };
  expect_stages_train_as(four, rows);
}

/// The embedding, on the first stage, is the head's matrix, too.
TEST(PipelineEngine, LateGradientsAreThoseOfALateReference) {
  const std::vector<int> two{0, 3, 6};
  const std::vector<int> three{0, 2, 4, 6};
  expect_stages_train_as(trained_late(two, 4),
                         {{.schedule = "ouroboros", .bounds = two},
                          {.schedule = "ouroboros", .stage = 3, .unshard = "step", .bounds = two},
                          {.schedule = "ouroboros", .dp = 2, .micro = 2, .stage = 2, .bounds = two},
                          {.schedule = "ouroboros", .tp = 2, .stage = 3, .bounds = two}});
  expect_stages_train_as(trained_late(three, 2),
                         {{.schedule = "ouroboros", .pp = 3, .micro = 2, .stage = 3, .bounds = three}});
  expect_stages_train_as(trained_plainly(4, 4), {{.schedule = "ouroboros", .pp = 1}});
}

TEST(PipelineEngine, StagesThatShareAHeadTrainAsOneProcessDoes) {
  expect_stages_train_as(trained_plainly(4, 4, Head::kShared),
                         {{.vocabulary = "two_barriers"},
                          {.schedule = "zb-h1", .stage = 3, .vocabulary = "one_barrier"},
                          {.schedule = "zb-v", .stage = 2, .bounds = {0, 2, 3, 5, 7}, .vocabulary = "two_barriers"},
                          {.pp = 3, .stage = 3, .unshard = "step", .vocabulary = "one_barrier"},
                          {.pp = 1, .stage = 3, .vocabulary = "two_barriers"},
                          {.dp = 2, .micro = 2, .stage = 3, .vocabulary = "two_barriers"},
                          {.tp = 2, .stage = 2, .recompute = true, .vocabulary = "one_barrier"},
                          {.sp = 2, .stage = 3, .vocabulary = "two_barriers"},
                          {.schedule = "zb-h1", .sp = 2, .stage = 1, .vocabulary = "one_barrier"},
                          {.sp = 2, .stage = 2, .vocabulary = "whole"}});
}

TEST(PipelineEngine, WithoutTiedWeightsStagesHaveTheBitsOfOne) {
  std::vector<std::vector<double>> runs;
  for (const Row& row : {Row{.pp = 1}, Row{.pp = 2}, Row{.schedule = "zb-h1", .pp = 2, .stage = 3}}) {
    std::vector<double>& run = runs.emplace_back();
    run_world(row.pp, [&](const World& world) {
      at::set_num_threads(1);
      const Mesh mesh = mesh_for(config_of(row), world);
      Text model(4, RankGroup(mesh.axis("tp")), Head::kOwn);
      PipelineEngine engine(model.ptr(), model->layers(), config_of(row), world, quiet());
      std::vector<double> own;
      for (int step = 0; step < kSteps; ++step) {
        const auto [result, loss] = engine.train_batch(own_batches(step, 0, row.micro));
        own.insert(own.end(), {loss, result.grad_norm});
      }
      if (world.rank() == 0) run = own;
    });
  }
  EXPECT_EQ(runs[1], runs[0]);
  EXPECT_EQ(runs[2], runs[0]);
}

/// In float64, with values of their own: ranks are threads, which draw from torch's generator at the same time.
std::vector<Layer> layers_with_loss(torch::nn::Sequential& model) {
  model->to(torch::kFloat64);
  for (std::uint64_t seed = 40; Tensor& parameter : model->parameters())
    parameter.set_data(values(parameter.sizes().vec(), seed++));
  std::vector<Layer> layers = libtorch::layers_of(model);
  layers.push_back({.name = "loss",
                    .forward = [](const Tensors& y, const MicroBatch&) -> Tensors { return {y[0].square().mean()}; }});
  return layers;
}

/// Drops, and counts its forwards in a buffer that they read.
struct CountingImpl : torch::nn::Module {
  CountingImpl() : count(register_buffer("count", torch::zeros({}, torch::kFloat64))) {}
  Tensor forward(const Tensor& x) {
    const torch::NoGradGuard no_grad;
    count.add_(1);
    const Tensor scale = 1 / count;
    const torch::AutoGradMode with_grad(true);
    return torch::dropout(x, 0.4, /*train=*/true) * scale;
  }
  Tensor count;
};
TORCH_MODULE(Counting);

/// In one process: ranks are threads, which share torch's random numbers.
TEST(PipelineEngine, WhatIsComputedAgainHasTheSameBits) {
  struct Ran {
    std::vector<double> numbers{};
    std::map<std::string, Tensor> buffers{};
    libtorch::PipelineReport report{};
  };
  const auto train = [](bool recompute) {
    Ran ran;
    run_world(1, [&](const World& world) {
      at::set_num_threads(1);
      torch::nn::Sequential model(torch::nn::Linear(6, 6), torch::nn::BatchNorm1d(6), Counting(),
                                  torch::nn::Linear(6, 1));
      const std::vector<Layer> layers = layers_with_loss(model);
      torch::manual_seed(3);
      const Row row{.schedule = "gpipe", .pp = 1, .micro = 3, .recompute = recompute};
      PipelineEngine engine(model.ptr(), layers, config_of(row), world, quiet());
      for (std::uint64_t step = 0; step < 2; ++step) {
        std::vector<MicroBatch> batches;
        for (std::uint64_t number = 0; number < 3; ++number)
          batches.push_back({.inputs = {values({5, 6}, 10 * step + number)}});
        const auto [result, loss] = engine.train_batch(std::move(batches));
        ran.numbers.insert(ran.numbers.end(), {loss, result.grad_norm});
      }
      ran.numbers.push_back(torch::rand({1}, torch::kFloat64).item<double>());
      for (const auto& item : model->named_buffers()) ran.buffers[item.key()] = item.value().clone();
      ran.report = engine.pipeline().report();
    });
    return ran;
  };
  const Ran plain = train(false);
  const Ran again = train(true);
  EXPECT_EQ(again.numbers, plain.numbers);
  for (const auto& [name, buffer] : plain.buffers) EXPECT_TRUE(torch::equal(again.buffers.at(name), buffer)) << name;
  EXPECT_EQ(plain.buffers.at("2.count").item<double>(), 6);
  EXPECT_EQ(plain.report.live_peak, 3);
  EXPECT_EQ(again.report.live_peak, 1);
  EXPECT_EQ(again.report.recomputed, 6U);
}

TEST(PipelineEngine, LoopsOfTheCallersOwnAreTheSame) {
  const Trained expected = trained_plainly(4, 4);
  run_world(2, [&](const World& world) {
    at::set_num_threads(1);
    const Row row;
    const Mesh mesh = mesh_for(config_of(row), world);
    Text model(4, RankGroup(mesh.axis("tp")));
    PipelineEngine engine(model.ptr(), model->layers(), config_of(row), world, quiet());
    engine.give(own_batches(0, 0, 4));
    engine.pipeline().begin();
    for (const Action& action : engine.pipeline().actions()) engine.pipeline().run(action);
    require_close(engine.pipeline().end().loss, expected.losses[0], "loss");
    require(engine.pipeline().report().live_peak == (world.rank() == 0 ? 2 : 1), "1F1B keeps two micro-batches");
  });
}

TEST(PipelineEngine, InputsOfAMicroBatchAreCastAndTargetsAreNot) {
  for (const int stages : {1, 2}) {
    run_world(stages, [stages](const World& world) {
      Config config;
      config.bf16 = true;
      config.bf16_auto_cast = true;
      config.mesh.pp = stages;
      torch::nn::Linear first(kFeatures, kFeatures), last(kFeatures, kFeatures);
      torch::nn::Sequential model(first, last);
      std::vector<Layer> layers{libtorch::layer("first", first),
                                {.name = "last",
                                 .forward = [last](const Tensors& x, const MicroBatch& batch) mutable -> Tensors {
                                   require(batch.targets[0].scalar_type() == torch::kFloat, "targets stay");
                                   return {torch::mse_loss(last(x[0]).to(torch::kFloat), batch.targets[0])};
                                 },
                                 .modules = {last.ptr()}}};
      PipelineEngine engine(model.ptr(), std::move(layers), config, world, quiet());
      const MicroBatch batch{.inputs = {torch::ones({2, kFeatures})}, .targets = {torch::ones({2, kFeatures})}};
      require(engine.train_batch({batch}).step.committed, "float32 inputs are cast");
      require(engine.eval_batch({batch}) > 0, "in evaluations, too");
    });
  }
}

TEST(PipelineEngine, StatisticsOfALayerAreThoseOfItsStage) {
  const auto values_after = [](int pp) {
    std::vector<Tensor> found(2);
    run_world(pp, [&](const World& world) {
      at::set_num_threads(1);
      torch::nn::Sequential model(torch::nn::Linear(6, 6), torch::nn::BatchNorm1d(6), torch::nn::Linear(6, 1));
      const std::vector<Layer> layers = layers_with_loss(model);
      const Row row{.pp = pp, .micro = 2};
      const std::vector<int> bounds = pp == 1 ? std::vector<int>{0, 4} : std::vector<int>{0, 1, 4};
      PipelineEngine engine(model.ptr(), layers, config_of(row), world, quiet(), bounds);
      for (int step = 0; step < 2; ++step) {
        const auto seed = static_cast<std::uint64_t>(step);
        (void)engine.train_batch({{.inputs = {values({5, 6}, seed)}}, {.inputs = {values({5, 6}, seed + 10)}}});
      }
      found[static_cast<std::size_t>(world.rank())] = model->named_buffers()["1.running_mean"].clone();
    });
    return found;
  };
  const Tensor expected = values_after(1)[0];
  EXPECT_GT(expected.abs().max().item<double>(), 0.01);
  for (const Tensor& got : values_after(2)) EXPECT_TRUE(torch::equal(got, expected));
}

TEST(PipelineEngine, EvaluationsDropNothingAndGiveEachModuleItsModeBack) {
  run_world(2, [&](const World& world) {
    at::set_num_threads(1);
    torch::nn::Sequential model(torch::nn::Linear(6, 6), torch::nn::Dropout(0.5), torch::nn::Linear(6, 6),
                                torch::nn::Dropout(0.5));
    const std::vector<Layer> layers = layers_with_loss(model);
    const std::vector<int> bounds{0, 2, static_cast<int>(layers.size())};
    PipelineEngine engine(model.ptr(), layers, config_of({.pp = 2, .micro = 1}), world, quiet(), bounds);
    model->train();
    model[3]->eval();
    const auto modes = [&] {
      std::vector<bool> found;
      for (const auto& module : model->modules()) found.push_back(module->is_training());
      return found;
    };
    const std::vector<bool> before = modes();
    const MicroBatch batch{.inputs = {values({5, 6}, 3)}};
    const double loss = engine.eval_batch({batch});
    require(engine.eval_batch({batch}) == loss, "the same loss again");
    require(torch::equal(engine.outputs(batch)[0], engine.outputs(batch)[0]), "the same outputs again");
    require(modes() == before, "modes are given back");
    bool refused = false;
    try {
      (void)engine.eval_batch({{.inputs = {values({5, 7}, 3)}}});
    } catch (const Error&) {
      refused = true;
    }
    require(refused && modes() == before, "modes are given back after an error");
    (void)engine.pipeline();
  });
}

TEST(PipelineEngine, SaysWhoHasRowsOfTheHead) {
  run_world(2, [&](const World& world) {
    const Row row{.vocabulary = "one_barrier"};
    const Mesh mesh = mesh_for(config_of(row), world);
    Text model(4, RankGroup(mesh.axis("tp")), Head::kShared);
    const PipelineEngine engine(model.ptr(), model->layers(), config_of(row), world, quiet());
    require(engine.describe().ends_with("\n  all stages: head, [6, 5] rows"), engine.describe());
    require(model->shared->inner()->weight.size(0) == (world.rank() == 0 ? 6 : 5), "own rows");
  });
}

TEST(PipelineEngine, SaysWhoHasWhat) {
  run_world(2, [&](const World& world) {
    const Row row;
    const Mesh mesh = mesh_for(config_of(row), world);
    Text model(4, RankGroup(mesh.axis("tp")));
    const PipelineEngine engine(model.ptr(), model->layers(), config_of(row), world, quiet());
    require(engine.describe() ==
                "pipeline of 2 stages, 2 chunks, 4 micro-batches a step\n"
                "  stage 0: chunk 0: embedding to block1\n"
                "  stage 1: chunk 1: block2 to head",
            engine.describe());
  });
}

// --- lists of layers, without ranks

torch::nn::Sequential towers() {
  return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::ReLU(), torch::nn::Linear(8, 8),
                               torch::nn::Linear(8, 1));
}

TEST(PipelineModel, LayersOfASequentialAreItsModules) {
  torch::nn::Sequential model = towers();
  const std::vector<Layer> layers = libtorch::layers_of(model);
  ASSERT_EQ(layers.size(), 4U);
  EXPECT_EQ(layers[2].name, "2");
  const Tensor x = torch::randn({3, 4});
  EXPECT_TRUE(torch::equal(run(layers, {.inputs = {x}})[0], model->forward(x)));
}

TEST(PipelineModel, ChunksAreCutByWhatTheirParametersCost) {
  torch::nn::Sequential model = towers();  // 40, 0, 72 and 9 parameters
  std::vector<Layer> layers = libtorch::layers_of(model);
  EXPECT_THAT(libtorch::cut(layers, 2), ElementsAre(0, 1, 4)) << "40 and 81; the last chunk begins early";
  EXPECT_THAT(libtorch::cut(layers, 3, "parameters"), ElementsAre(0, 1, 3, 4)) << "40, 72 and 9";
  EXPECT_THAT(libtorch::cut(layers, 2, "uniform"), ElementsAre(0, 2, 4));
  EXPECT_THAT(libtorch::cut(layers, 3, "uniform"), ElementsAre(0, 2, 3, 4)) << "the first chunks have one more";
  layers[3].cost = 100;
  EXPECT_THAT(libtorch::cut(layers, 2), ElementsAre(0, 3, 4));
}

TEST(PipelineModel, TablesOfEmbeddingsCostNothingWhereTheyAreLookedUp) {
  torch::nn::Embedding table(100, 4);
  torch::nn::Linear one(10, 10);
  torch::nn::Linear other(10, 10);
  std::vector<Layer> layers{libtorch::layer("table", table), libtorch::layer("one", one),
                            libtorch::layer("other", other)};
  EXPECT_THAT(libtorch::cut(layers, 2), ElementsAre(0, 2, 3));
  EXPECT_THAT(libtorch::cut(layers, 2, "parameters"), ElementsAre(0, 1, 3));
  layers.push_back({.name = "head", .forward = layers[0].forward, .parameters = {table->weight}});
  EXPECT_THAT(libtorch::cut(layers, 2), ElementsAre(0, 3, 4)) << "a head multiplies with all of it";
}

TEST(PipelineModel, ALayerThatGetsOtherTensorsSaysItsName) {
  torch::nn::Linear one(4, 4);
  const Layer layer = libtorch::layer("first", one);
  try {
    static_cast<void>(layer.forward({torch::zeros({1, 4}), torch::zeros({1, 4})}, {}));
    FAIL() << "nothing thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kModel);
    EXPECT_THAT(error.what(), HasSubstr("layer first"));
  }
}

// --- refusals

/// What each of two ranks throws.
RankReport on_two(const std::function<void(PipelineEngine& engine)>& body,
                  const std::function<void(Text& model, std::vector<Layer>& layers)>& change,
                  const std::vector<int>& bounds = {}) {
  return try_world(2, [&](const World& world) {
    at::set_num_threads(1);
    const Mesh mesh = mesh_for(config_of({}), world);
    Text model(2, RankGroup(mesh.axis("tp")));
    std::vector<Layer> layers = model->layers();
    change(model, layers);
    PipelineEngine engine(model.ptr(), layers, config_of({}), world, quiet(), bounds);
    body(engine);
  });
}

void expect_refusal(const RankReport& report, int rank, ErrorCode code, const std::string& text) {
  ASSERT_NE(report.of(rank), nullptr) << "rank " << rank << " was not refused";
  EXPECT_EQ(report.of(rank)->code, code) << report.of(rank)->text;
  EXPECT_THAT(report.of(rank)->text, HasSubstr(text));
}

TEST(PipelineEngine, RefusesListsThatAreNotTheModel) {
  const auto nothing = [](PipelineEngine&) {};
  const auto as_it_is = [](Text&, std::vector<Layer>&) {};
  const auto refusal = [&](ErrorCode code, const std::string& text, const auto& change,
                           const std::vector<int>& bounds = {}) {
    SCOPED_TRACE(text);
    for (const int rank : {0, 1}) expect_refusal(on_two(nothing, change, bounds), rank, code, text);
  };
  refusal(ErrorCode::kUsage, "a pipeline of no layers", [](Text&, std::vector<Layer>& layers) { layers.clear(); });
  refusal(ErrorCode::kUsage, "expected: 1 to 1 chunks, for so many layers",
          [](Text&, std::vector<Layer>& layers) { layers.resize(1); });
  refusal(ErrorCode::kUsage, "layer 1, block0", [](Text&, std::vector<Layer>& layers) { layers[1].forward = nullptr; });
  refusal(ErrorCode::kModel, "which: norm.weight",
          [](Text&, std::vector<Layer>& layers) { layers[3].modules.clear(); });
  refusal(ErrorCode::kModel, "layer other", [](Text&, std::vector<Layer>& layers) {
    torch::nn::Linear other(8, 8);
    layers.push_back(libtorch::layer("other", other));
  });
  for (const std::vector<int>& bounds :
       {std::vector<int>{0, 4}, {0, 0, 4}, {1, 2, 4}, {0, 2, 3}, {0, 5, 4}, {-1, 2, 4}})
    refusal(ErrorCode::kUsage, "the bounds of chunks do not fit the layers", as_it_is, bounds);
}

TEST(PipelineEngine, HeadsThatStagesCannotShareAreRefused) {
  const auto refusal = [](Head head, int pp, const std::function<void(Text&, std::vector<Layer>&)>& change,
                          ErrorCode code, const std::string& text, bool trains = false) {
    SCOPED_TRACE(text);
    const Row row{.pp = pp, .vocabulary = "two_barriers"};
    const RankReport report = try_world(pp, [&](const World& world) {
      at::set_num_threads(1);
      const Mesh mesh = mesh_for(config_of(row), world);
      Text model(2, RankGroup(mesh.axis("tp")), head);
      std::vector<Layer> layers = model->layers();
      change(model, layers);
      PipelineEngine engine(model.ptr(), layers, config_of(row), world, quiet());
      if (trains) (void)engine.train_batch(own_batches(0, 0, row.micro));
    });
    expect_refusal(report, pp - 1, code, text);
    for (int rank = 0; rank < pp; ++rank) EXPECT_NE(report.of(rank), nullptr) << "rank " << rank;
  };
  const auto as_it_is = [](Text&, std::vector<Layer>&) {};
  refusal(Head::kOwn, 2, as_it_is, ErrorCode::kModel,
          "is no head that stages can share; where: libtorch.pipeline; which: layer head");
  refusal(
      Head::kShared, 2,
      [](Text& model, std::vector<Layer>& layers) { layers[1].parameters = {model->shared->inner()->bias}; },
      ErrorCode::kModel, "one that layer block0 uses, too");
  refusal(
      Head::kShared, 2,
      [](Text& model, std::vector<Layer>& layers) {
        layers[3].forward = [](const Tensors& in, const MicroBatch&) -> Tensors { return in; };
        static_cast<void>(model);
      },
      ErrorCode::kModel, "given other values than its input", /*trains=*/true);
  refusal(
      Head::kShared, 2,
      [](Text&, std::vector<Layer>& layers) {
        layers[2].forward = [forward = layers[2].forward](const Tensors& in, const MicroBatch& batch) -> Tensors {
          const Tensors out = forward(in, batch);
          return {out[0].narrow(1, 0, 1), out[1].narrow(1, 0, 1)};
        };
      },
      ErrorCode::kModel, "expected: int64, 2 of them", /*trains=*/true);
}

TEST(PipelineEngine, RanksThatCutInOtherWaysAreRefused) {
  const RankReport report = try_world(2, [&](const World& world) {
    const Mesh mesh = mesh_for(config_of({}), world);
    Text model(2, RankGroup(mesh.axis("tp")));
    const std::vector<int> bounds{0, 1 + world.rank(), 4};
    const PipelineEngine engine(model.ptr(), model->layers(), config_of({}), world, quiet(), bounds);
  });
  for (const int rank : {0, 1})
    expect_refusal(report, rank, ErrorCode::kMismatch,
                   "ranks cut the model in different ways; where: libtorch.pipeline; who: 1 of 2 ranks");
}

TEST(PipelineEngine, StagesThatDoNotFitTheRanksAreRefused) {
  for (const int pp : {-1, 0, 3}) {
    const RankReport report = try_world(2, [&](const World& world) {
      const Mesh mesh = world.mesh({{{"dp", 2}, {"tp", 1}}});
      Text model(4, RankGroup(mesh.axis("tp")));
      const PipelineEngine engine(model.ptr(), model->layers(), config_of({.pp = pp}), world, quiet());
    });
    for (const int rank : {0, 1}) expect_refusal(report, rank, ErrorCode::kConfig, "/zeroth/mesh");
  }
}

TEST(PipelineEngine, ALayerThatCannotTakeItsValuesIsNamed) {
  const auto change = [](Text&, std::vector<Layer>& layers) {
    layers[2].forward = [forward = layers[2].forward](const Tensors& in, const MicroBatch& batch) -> Tensors {
      Tensors out = forward(in, batch);
      return {out[0].narrow(-1, 0, 5), out[1].narrow(-1, 0, 5)};
    };
  };
  const RankReport report =
      on_two([](PipelineEngine& engine) { (void)engine.train_batch(own_batches(0, 0, 4)); }, change, {0, 3, 4});
  expect_refusal(report, 1, ErrorCode::kUser, "which: layer head, micro-batch 0; got: the values CPUDoubleType [2, ");
  EXPECT_THAT(report.of(1)->text, HasSubstr("normalized_shape=[8]"));
  EXPECT_NE(report.of(0), nullptr) << "the other stage waits for ever";
}

TEST(PipelineEngine, ALastLayerWithoutALossIsNamed) {
  const auto change = [](Text&, std::vector<Layer>& layers) {
    layers.back().forward = [forward = layers.back().forward](const Tensors& in, const MicroBatch& batch) -> Tensors {
      return forward(in, {.inputs = batch.inputs});
    };
  };
  const RankReport report =
      on_two([](PipelineEngine& engine) { (void)engine.train_batch(own_batches(0, 0, 4)); }, change);
  expect_refusal(report, 1, ErrorCode::kModel, "layer head");
  EXPECT_NE(report.of(0), nullptr) << "the other stage waits for ever";
}

TEST(PipelineEngine, AnotherNumberOfMicroBatchesIsRefused) {
  const RankReport report = on_two([](PipelineEngine& engine) { (void)engine.train_batch(own_batches(0, 0, 3)); },
                                   [](Text&, std::vector<Layer>&) {});
  for (const int rank : {0, 1}) expect_refusal(report, rank, ErrorCode::kMismatch, "gradient_accumulation_steps, 4");
}

TEST(PipelineEngine, AModelThatIsNotCutIsRefused) {
  const RankReport report = try_world(2, [&](const World& world) {
    const Mesh mesh = mesh_for(config_of({}), world);
    Text model(2, RankGroup(mesh.axis("tp")));
    const libtorch::EngineBase engine(model.ptr(), config_of({}), world, quiet());
  });
  for (const int rank : {0, 1}) expect_refusal(report, rank, ErrorCode::kModel, "pipeline_engine.h");
}

}  // namespace
}  // namespace zeroth::test
