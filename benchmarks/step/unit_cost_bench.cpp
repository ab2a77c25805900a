// What a unit costs: 500 linears of 16 x 16 with bias, each its own unit, so that there is hardly any
// arithmetic to hide behind.
//
//   zeroth-run -n 2 unit_cost_bench --cycles 20 --json unit_cost.json
//
// The floor is the same chain by plain torch with torch's fused AdamW. Printed are microseconds a unit and
// step beyond it.
#include "step/job.h"
#include "step/paired_blocks.h"
#include "support/record.h"

#include <zeroth/libtorch/engine.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <CLI/CLI.hpp>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/version.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::benchmarks {
namespace {

constexpr std::int64_t kWidth = 16;
constexpr std::int64_t kBatch = 4;
constexpr double kLr = 1e-5;

/// Near the identity, so that values and gradients keep their size over 500 layers (and no denormals slow
/// anything down).
torch::nn::Linear make_linear() {
  torch::nn::Linear linear(kWidth, kWidth);
  const torch::NoGradGuard no_grad;
  linear->weight.copy_(torch::eye(kWidth) + 1e-3 * torch::ones({kWidth, kWidth}).tril(-1));
  linear->bias.zero_();
  return linear;
}

class PlainChainImpl : public torch::nn::Module {
 public:
  explicit PlainChainImpl(std::int64_t length) {
    list_ = register_module("list", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < length; ++i) {
      linears_.push_back(make_linear());
      list_->push_back(linears_.back());
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& linear : linears_) x = linear->forward(x);
    return x.square().mean();
  }

 private:
  torch::nn::ModuleList list_{};
  std::vector<torch::nn::Linear> linears_{};
};
TORCH_MODULE(PlainChain);

class UnitChainImpl : public torch::nn::Module {
 public:
  explicit UnitChainImpl(std::int64_t length) {
    list_ = register_module("list", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < length; ++i) {
      units_.emplace_back(make_linear());
      list_->push_back(units_.back());
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& unit : units_) x = unit->forward(x);
    return x.square().mean();
  }

 private:
  torch::nn::ModuleList list_{};
  std::vector<libtorch::Unit<torch::nn::Linear>> units_{};
};
TORCH_MODULE(UnitChain);

torch::Tensor make_input() {
  return torch::linspace(0.5, 1.5, kBatch * kWidth).view({kBatch, kWidth});
}

class PlainContestant final : public Contestant {
 public:
  explicit PlainContestant(std::int64_t length)
      : Contestant("plain torch"), chain_(length), params_(chain_->parameters()), input_(make_input()) {
    for (const torch::Tensor& param : params_) {
      exp_avgs_.push_back(torch::zeros_like(param));
      exp_avg_sqs_.push_back(torch::zeros_like(param));
      steps_.push_back(torch::zeros({}, torch::kFloat32));
    }
  }
  void step(PhaseTimes& phases) override {
    const Times start = now();
    const torch::Tensor loss = chain_->forward(input_);
    phases[0] += since(start);
    const Times middle = now();
    loss.backward();
    phases[1] += since(middle);
    const Times end = now();
    update();
    phases[2] += since(end);
  }

 private:
  void update() {
    const torch::NoGradGuard no_grad;
    std::vector<torch::Tensor> grads;
    for (const torch::Tensor& param : params_) grads.push_back(param.grad());
    at::_foreach_add_(steps_, 1.0);
    at::_fused_adamw_(params_, grads, exp_avgs_, exp_avg_sqs_, {}, steps_, kLr, 0.9, 0.999, 0.01, 1e-8, false, false);
    for (torch::Tensor& param : params_) param.mutable_grad().reset();
  }

  PlainChain chain_;
  std::vector<torch::Tensor> params_;
  torch::Tensor input_;
  std::vector<torch::Tensor> exp_avgs_;
  std::vector<torch::Tensor> exp_avg_sqs_;
  std::vector<torch::Tensor> steps_;
};

class EngineContestant final : public Contestant {
 public:
  EngineContestant(std::int64_t length, int zero_stage, const World& world)
      : Contestant("zero-" + std::to_string(zero_stage)),
        input_(make_input()),
        engine_(UnitChain(length), config(zero_stage), world, {.log_level = LogLevel::kWarning}) {}
  void step(PhaseTimes& phases) override {
    const Times start = now();
    const torch::Tensor loss = engine_.forward(input_);
    phases[0] += since(start);
    const Times middle = now();
    engine_.backward(loss);
    phases[1] += since(middle);
    const Times end = now();
    engine_.step();
    phases[2] += since(end);
  }

 private:
  static Config config(int zero_stage) {
    return Config::from_json_text(
        R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            "zeroth": {"threads": 1}, "zero_optimization": {"stage": )" +
            std::to_string(zero_stage) + "}}",
        "unit_cost_bench");
  }
  torch::Tensor input_;
  libtorch::Engine<UnitChainImpl> engine_;
};

struct Options {
  std::int64_t units = 500;
  std::vector<int> plans{0, 1, 2, 3};
  PairedOptions paired{.cycles = 15, .steps_per_block = 20, .warmup_steps = 10};
  std::string json{};
};

template <Phase kPhase>
void add_phase(Record& record, const PairedResult& result, std::size_t contestant, double scale, int ranks) {
  constexpr auto kIndex = static_cast<std::size_t>(kPhase);
  const std::string name = result.names[contestant] + " " + std::string(name_of(kPhase)) + " a unit";
  const auto wall = [](const BlockTime& block) { return block.phase_wall[kIndex]; };
  const auto cpu = [](const BlockTime& block) { return block.phase_cpu[kIndex]; };
  record.add({name + ", wall", "us", result.over_floor(contestant, wall, scale), Better::kLower});
  record.add({name + ", CPU a rank", "us", result.over_floor(contestant, cpu, scale / ranks), Better::kLower});
}

void run(const Options& options, const World& world, int argc, const char* const* argv) {
  Record record("step/unit-cost", argc, argv, launcher_prefix(world));
  const Communicator communicator = make_bench_communicator(world);
  std::vector<std::unique_ptr<Contestant>> contestants;
  contestants.push_back(std::make_unique<PlainContestant>(options.units));
  for (const int zero_stage : options.plans) {
    contestants.push_back(std::make_unique<EngineContestant>(options.units, zero_stage, world));
  }
  const PairedResult result = run_paired(contestants, options.paired, communicator);
  if (world.rank() != 0) return;

  const double scale = 1e6 / static_cast<double>(options.units);
  record.version("torch", TORCH_VERSION);
  record.setting("units", options.units);
  record.setting("ranks", world.size());
  record.setting("cycles", result.cycles.size());
  record.setting("steps_per_block", options.paired.steps_per_block);
  record.set_own_cpu_seconds(result.own_cpu_seconds);
  const auto wall = [](const BlockTime& block) { return block.wall; };
  const auto cpu = [](const BlockTime& block) { return block.cpu; };
  const double per_rank = scale / world.size();
  record.add({"plain torch, step", "ms", result.absolute(0, wall, 1e3)});
  record.add({"plain torch, CPU a unit and rank", "us", result.absolute(0, cpu, per_rank)});
  for (std::size_t i = 1; i < result.names.size(); ++i) {
    const std::string& name = result.names[i];
    Row row{name + " a unit and step", "us", result.over_floor(i, wall, scale), Better::kLower};
    if (world.size() <= 2) row.bar = world.size() == 1 ? 15.0 : 30.0;
    record.add(std::move(row));
    record.add({name + " CPU a unit and rank", "us", result.over_floor(i, cpu, per_rank), Better::kLower});
    add_phase<Phase::kForward>(record, result, i, scale, world.size());
    add_phase<Phase::kBackward>(record, result, i, scale, world.size());
    add_phase<Phase::kStep>(record, result, i, scale, world.size());
  }
  record.note(
      "a negative step() means that torch's fused AdamW pays more for two small tensors than the engine's "
      "whole step()");
  std::printf("%s", record.table().c_str());
  record.write(options.json);
}

}  // namespace
}  // namespace zeroth::benchmarks

int main(int argc, char** argv) {
  using namespace zeroth::benchmarks;
  Options options;
  CLI::App app{"Cost of a unit beyond plain torch"};
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--units", options.units)->check(CLI::PositiveNumber);
  app.add_option("--plans,--zero-stage", options.plans)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->delimiter(',')
      ->check(CLI::Range(0, 3));
  add_options(app, options.paired);
  app.add_option("--json", options.json, "file for the result");
  CLI11_PARSE(app, argc, argv);
  return run_job([&](const zeroth::World& world) { run(options, world, argc, argv); });
}
