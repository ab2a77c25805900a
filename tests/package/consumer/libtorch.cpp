// A LibTorch trainer on the installed package: one step of a linear layer.
#include <zeroth/libtorch/engine.h>

#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdio>
#include <string>

int main() {
  for (const char* stage : {"0", "3"}) {
    const std::string text =
        std::string(R"({"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}},)") +
        R"("zero_optimization": {"stage": )" + stage + "}}";
    zeroth::libtorch::Engine engine(torch::nn::Linear(3, 1),
                                    zeroth::Config::from_json_text(text, "the consumer"),
                                    zeroth::World::from_environment());
    const torch::Tensor input = torch::ones({1, 3});
    const torch::Tensor before = engine.forward(input);
    engine.backward(before.sum());  // the gradient of the three weights and of the bias is 1
    if (!engine.step().committed) return 1;
    const torch::Tensor after = engine.forward(input);
    const double moved = (before - after).detach().item<double>();
    std::printf("stage %s: the output moved by %g\n", stage, moved);
    if (moved < 1.999 || moved > 2.001) return 1;  // 4 * 0.5, up to rounding
  }
  std::puts("consumer works");
  return 0;
}
