// zeroth::libtorch::Moe for moe_test.py, which wants the bits of zeroth.nn.MoE.
//
// usage: moe_program IN OUT
// IN: a dict of torch.save(): the parameters by their names, and x [steps, T, D]. OUT: such a dict of results by step.
#include <zeroth/libtorch/moe.h>

#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/torch.h>

#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace zeroth::libtorch;  // NOLINT(google-build-using-namespace)

int run(const std::string& in, const std::string& out) {
  at::set_num_threads(1);
  std::ifstream input(in, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(input)), {});
  const auto given = torch::pickle_load(bytes).toGenericDict();
  const auto tensor = [&](const std::string& name) { return given.at(name).toTensor(); };
  const std::int64_t num_experts = tensor("gate.weight").size(0);
  const std::int64_t width = tensor("gate.weight").size(1);
  GatedExperts experts(tensor("experts.gate_up").clone(), tensor("experts.down").clone());
  const torch::nn::Linear residual(torch::nn::LinearOptions(width, width));
  const torch::nn::Linear shared(torch::nn::LinearOptions(width, width));
  MoeOptions options{.width = width, .num_experts = num_experts};
  options.gate.router.choices = 2;
  options.gate.router.scale = 1.5;
  options.gate.capacity_factor = 0.6;
  options.gate.min_capacity = 1;
  options.gate.noise = GateNoise::kJitter;
  options.gate.balance = BalanceBy::kBoth;
  options.gate.bias_rate = 0.05;
  options.gate.seed = 11;
  Moe moe(options, experts_module(experts), row_module(residual), row_module(shared));
  {
    const torch::NoGradGuard no_gradient;
    for (auto& item : moe->named_parameters()) item.value().copy_(tensor(item.key()));
  }
  c10::Dict<std::string, at::Tensor> results;
  const at::Tensor x = tensor("x");
  for (std::int64_t step = 0; step < x.size(0); ++step) {
    const auto [y, balance, counts] = moe->forward(x[step]);
    (y.square().sum() + balance).backward();
    moe->begin_step();
    const std::string suffix = "." + std::to_string(step);
    results.insert("out" + suffix, y.detach());
    results.insert("balance" + suffix, balance.detach());
    results.insert("counts" + suffix, counts);
    results.insert("bias" + suffix, moe->balance_bias.clone());
  }
  for (const auto& item : moe->named_parameters()) results.insert("gradient of " + item.key(), item.value().grad());
  const std::vector<char> saved = torch::pickle_save(results);
  std::ofstream(out, std::ios::binary).write(saved.data(), static_cast<std::streamsize>(saved.size()));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return argc == 3 ? run(argv[1], argv[2]) : 64;
}
