// A residual network in the stages of a pipeline, one stage a rank. It shows a model as a list of layers, a weight that
// two layers share, who has which layers, what each rank does in a step, and the losses.
//
//   build/bin/zeroth-run -n 2 build/release/examples/example-pipeline
//
// prints
//
//   pipeline of 2 stages, 2 chunks, 3 micro-batches a step
//     stage 0: chunk 0: entry to block2
//     stage 1: chunk 1: block3 to loss
//   zeroth-program 1 schedule=1f1b ranks=2 micro_batches=3 chunks=0,1
//   0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2 0REDUCE STEP
//   1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1REDUCE STEP
//   step 20  loss 0.4339
//   step 40  loss 0.2602
//   step 60  loss 0.1542
//   held-out loss 0.1941
//
// One rank, build/release/examples/example-pipeline, prints the same losses; so do three and four.
#include <zeroth/engine/run.h>
#include <zeroth/libtorch/pipeline_engine.h>

#include <torch/torch.h>

#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

namespace {

using zeroth::libtorch::layer;
using zeroth::libtorch::Layer;
using zeroth::libtorch::MicroBatch;
using zeroth::libtorch::Tensors;

constexpr int kMicroBatches = 3;  // a step

struct BlockImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x_BD) { return x_BD + 0.3 * torch::tanh(inner(x_BD)); }
  torch::nn::Linear inner = register_module("inner", torch::nn::Linear(32, 32));
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int block = 0; block < 6; ++block) {
      blocks.emplace_back(Block());  // a Unit: gathered and reduced as one
      register_module("block" + std::to_string(block), blocks.back());
    }
    to(torch::kFloat64);
  }
  std::vector<Layer> layers() {
    std::vector<Layer> list{layer("entry", entry)};
    for (auto& block : blocks) list.push_back(layer("block" + std::to_string(list.size() - 1), block));
    // The way out is the way in, transposed: the first and the last stage have this weight, and its gradients are
    // summed over them.
    list.push_back({.name = "loss",
                    .forward = [weight = entry->weight](const Tensors& h, const MicroBatch& batch) -> Tensors {
                      return {torch::mse_loss(torch::matmul(h[0], weight), batch.targets[0])};
                    },
                    .parameters = {entry->weight}});
    return list;
  }
  torch::nn::Linear entry = register_module("entry", torch::nn::Linear(8, 32));
  std::vector<zeroth::libtorch::Unit<Block>> blocks;
};
TORCH_MODULE(Net);

/// Each row is its own target, reversed. All stages of a pipeline make the same micro-batches.
std::vector<MicroBatch> make_batches(int count) {
  std::vector<MicroBatch> batches;
  for (int number = 0; number < count; ++number) {
    const torch::Tensor x_BF = torch::randn({16, 8}, torch::kFloat64);
    batches.push_back({.inputs = {x_BF}, .targets = {x_BF.flip(1)}});
  }
  return batches;
}

void train(const zeroth::World& world) {
  const zeroth::Config config = zeroth::Config::from_json_text(
      R"({"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
          "gradient_accumulation_steps": )" +
          std::to_string(kMicroBatches) + R"(,
          "zeroth": {"mesh": {"pp": )" +
          std::to_string(world.size()) + R"(}, "pipeline": {"schedule": "1f1b"}}})",
      "examples/pipeline");
  torch::manual_seed(1);  // on every rank: the same model, and the same batches
  Net net;
  zeroth::libtorch::PipelineEngine engine(net.ptr(), net->layers(), config, world,
                                          {.log_level = zeroth::LogLevel::kWarning});
  const bool speaks = world.rank() == 0;
  if (speaks) std::cout << engine.describe() << "\n" << to_text(engine.program());
  for (int step = 1; step <= 60; ++step) {
    const auto [result, loss] = engine.train_batch(make_batches(kMicroBatches));
    if (speaks && step % 20 == 0) std::printf("step %d  loss %.4f\n", step, loss);
  }
  const double held_out = engine.eval_batch(make_batches(3));
  if (speaks) std::printf("held-out loss %.4f\n", held_out);
}

}  // namespace

int main() {
  return zeroth::run(train);
}
