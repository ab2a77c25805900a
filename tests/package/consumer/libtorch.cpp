// A LibTorch trainer on the installed package: the code of README.md and docs/cpp-api.md, as it stands there
// (tests/docs/blocks.py).
#include "docs/cpp-api-1.cpp"
#include "docs/cpp-api-2.cpp"
#include "docs/cpp-api-3.cpp"

#include <zeroth/engine/run.h>

#include <string>
#include <vector>

namespace {

struct Batch {
  torch::Tensor x;
  torch::Tensor y;
};

void ten_lines(const Net& model, const std::vector<Batch>& batches) {
#include "README-1.cpp"
}

/// How far the output of a linear layer of ones moves in one step of SGD, in which only the weights decay.
double one_step(int zero_stage, const zeroth::World& world) {
  const std::string stage = std::to_string(zero_stage);
  const auto config = zeroth::Config::from_json_text(
      R"({"optimizer": {"type": "SGD", "params": {"lr": 0.5, "weight_decay": 1}}, "zero_optimization": {"stage": )" +
          stage + "}}",
      "the consumer");
  const torch::nn::Linear net(3, 1);
  for (const torch::Tensor& parameter : net->parameters()) torch::nn::init::ones_(parameter);
#include "docs/cpp-api-4.cpp"
  const torch::Tensor input = torch::ones({1, 3});
  const torch::Tensor before = engine.forward(input);
  engine.backward(before.sum());  // the gradient of the three weights and of the bias is 1, with decay 2 and 1
  if (!engine.step().committed) return 0;
  return (before - engine.forward(input)).detach().item<double>();
}

}  // namespace

int main(int argc, char** argv) {
  return zeroth::run([&](const zeroth::World& world) {
    if (argc > 1 && world.rank() == world.size() - 1) {
      std::printf("what was said before");  // no line, so it is still in a buffer
      TORCH_CHECK(false, argv[1]);
    }
    ten_lines(Net(), {2, {torch::ones({32, 64}), torch::ones({32})}});
    train(world);
    if (world.size() == 2) {
      train_in_stages(world, {8, {.inputs = {torch::ones({4, 64})}, .targets = {torch::ones({4})}}});
      if (!(train_shared(world) > 0)) return 1;
    }
    for (const int zero_stage : {0, 3}) {
      const double moved = one_step(zero_stage, world);
      std::printf("stage %d: the output moved by %g\n", zero_stage, moved);
      if (moved != 3.5) return 1;  // 0.5 * (3 * 2 + 1)
    }
    std::puts("consumer works");
    return 0;
  });
}
