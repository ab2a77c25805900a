#include "step/gpt_contestants.h"

#include <zeroth/base/text.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adamw.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace zeroth::benchmarks {
namespace {

constexpr double kLr = 3e-4;
constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.999;
constexpr double kEps = 1e-8;
constexpr double kWeightDecay = 0.01;
constexpr std::size_t kNumBatches = 8;

gpt::Gpt make_gpt(const GptCase& gpt_case) {
  gpt::Gpt model(shape_of(gpt_case));
  if (gpt_case.dtype == "bf16") model->to(torch::kBFloat16);
  return model;
}

/// Times the parts of a step one after the other.
class PhaseClock {
 public:
  explicit PhaseClock(PhaseTimes& phases) : phases_(phases), last_(now()) {}
  void end(Phase phase) {
    const Times time = now();
    phases_[static_cast<std::size_t>(phase)] += {.wall = time.wall - last_.wall, .cpu = time.cpu - last_.cpu};
    last_ = time;
  }

 private:
  PhaseTimes& phases_;
  Times last_;
};

class FloorGpt final : public Contestant {
 public:
  FloorGpt(const GptCase& gpt_case, std::shared_ptr<const Batches> batches, std::string name)
      : Contestant(std::move(name)),
        accumulate_(gpt_case.accumulate),
        batches_(std::move(batches)),
        model_(make_gpt(gpt_case)),
        params_(model_->parameters()) {
    const torch::NoGradGuard no_grad;
    for (const torch::Tensor& param : params_) {
      const torch::Tensor master = param.scalar_type() == torch::kFloat32 ? param.detach() : param.to(torch::kFloat32);
      masters_.push_back(master);
      exp_avgs_.push_back(torch::zeros_like(master));
      exp_avg_sqs_.push_back(torch::zeros_like(master));
      steps_.push_back(torch::zeros({}, torch::kFloat32));
      if (param.scalar_type() != torch::kFloat32) wide_grads_.push_back(torch::empty_like(master));
    }
  }

  void step(PhaseTimes& phases) override {
    PhaseClock clock(phases);
    for (int i = 0; i < accumulate_; ++i) {
      const Batches::Batch& batch = batches_->at(micro_step_++);
      const torch::Tensor loss = model_->forward(batch.x_BT, batch.y_BT);
      clock.end(Phase::kForward);
      loss.backward();
      clock.end(Phase::kBackward);
    }
    update();
    clock.end(Phase::kStep);
  }

 private:
  void update() {
    const torch::NoGradGuard no_grad;
    std::vector<torch::Tensor> grads;
    for (const torch::Tensor& param : params_) grads.push_back(param.grad());
    if (!wide_grads_.empty()) at::_foreach_copy_(wide_grads_, grads);
    at::_foreach_add_(steps_, 1.0);
    at::_fused_adamw_(masters_, wide_grads_.empty() ? grads : wide_grads_, exp_avgs_, exp_avg_sqs_,
                      /*max_exp_avg_sqs=*/{}, steps_, kLr, kBeta1, kBeta2, kWeightDecay, kEps,
                      /*amsgrad=*/false,
                      /*maximize=*/false);
    if (!wide_grads_.empty()) at::_foreach_copy_(params_, masters_);
    for (torch::Tensor& param : params_) param.mutable_grad().reset();
  }

  int accumulate_;
  std::shared_ptr<const Batches> batches_;
  gpt::Gpt model_;
  std::vector<torch::Tensor> params_;
  std::vector<torch::Tensor> masters_;
  std::vector<torch::Tensor> exp_avgs_;
  std::vector<torch::Tensor> exp_avg_sqs_;
  std::vector<torch::Tensor> steps_;
  std::vector<torch::Tensor> wide_grads_;
  std::size_t micro_step_ = 0;
};

Config engine_config(const GptCase& gpt_case, int zero_stage) {
  std::ostringstream text;
  text << R"({"train_micro_batch_size_per_gpu": )" << gpt_case.micro_batch << R"(, "gradient_accumulation_steps": )"
       << gpt_case.accumulate << R"(, "optimizer": {"type": "AdamW", "params": {"lr": )" << kLr << R"(, "betas": [)"
       << kBeta1 << ", " << kBeta2 << R"(], "eps": )" << kEps << R"(, "weight_decay": )" << kWeightDecay << "}}"
       << R"(, "bf16": {"enabled": )" << (gpt_case.dtype == "bf16" ? "true" : "false") << "}"
       << R"(, "zero_optimization": {"stage": )" << zero_stage << "}"
       << R"(, "zeroth": {"threads": 1, "reshard": ")" << gpt_case.reshard << R"("}})";
  return Config::from_json_text(text.str(), "step_bench");
}

}  // namespace

void add_options(CLI::App& app, GptCase& gpt_case) {
  app.add_option("--size", gpt_case.size, "parameters")->check(CLI::IsMember({"3m", "25m", "120m"}));
  app.add_option("--dtype", gpt_case.dtype)->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--micro-batch", gpt_case.micro_batch, "sequences")->check(CLI::PositiveNumber);
  app.add_option("--seq", gpt_case.seq, "tokens of a sequence")->check(CLI::PositiveNumber);
  app.add_option("--accumulate", gpt_case.accumulate, "micro-steps of a step")->check(CLI::PositiveNumber);
  app.add_option("--reshard", gpt_case.reshard)->check(CLI::IsMember({"default", "all", "none"}));
}

gpt::ModelOptions shape_of(const GptCase& gpt_case) {
  gpt::ModelOptions options;
  options.seq = gpt_case.seq;
  if (gpt_case.size == "3m") {
    options.layers = 4;
    options.d_model = 256;
  } else if (gpt_case.size == "25m") {
    options.layers = 8;
    options.d_model = 512;
  } else if (gpt_case.size == "120m") {
    options.layers = 17;
    options.d_model = 768;
  } else {
    throw std::invalid_argument("sizes are 3m, 25m and 120m, not " + gpt_case.size);
  }
  options.heads = options.d_model / 64;
  return options;
}

Batches::Batches(const GptCase& gpt_case, int rank) {
  std::mt19937_64 engine(1 + static_cast<std::uint64_t>(rank));
  for (std::size_t i = 0; i < kNumBatches; ++i) {
    torch::Tensor text_BT = torch::empty({gpt_case.micro_batch, gpt_case.seq + 1}, torch::kInt64);
    auto* token = text_BT.data_ptr<std::int64_t>();
    std::generate_n(token, text_BT.numel(), [&] { return static_cast<std::int64_t>(engine() % 256); });
    batches_.push_back(
        {text_BT.narrow(1, 0, gpt_case.seq).contiguous(), text_BT.narrow(1, 1, gpt_case.seq).contiguous()});
  }
}

std::unique_ptr<Contestant> make_floor(const GptCase& gpt_case, std::shared_ptr<const Batches> batches,
                                       std::string name) {
  return std::make_unique<FloorGpt>(gpt_case, std::move(batches), std::move(name));
}

EngineGpt::EngineGpt(const GptCase& gpt_case, int zero_stage, std::shared_ptr<const Batches> batches,
                     const World& world, std::string name)
    : Contestant(name.empty() ? "zero-" + std::to_string(zero_stage) : std::move(name)),
      accumulate_(gpt_case.accumulate),
      zero_stage_(zero_stage),
      batches_(std::move(batches)),
      engine_(make_gpt(gpt_case), engine_config(gpt_case, zero_stage), world, {.log_level = LogLevel::kWarning}) {}

void EngineGpt::step(PhaseTimes& phases) {
  PhaseClock clock(phases);
  torch::Tensor loss;
  for (int i = 0; i < accumulate_; ++i) {
    const Batches::Batch& batch = batches_->at(micro_step_++);
    loss = engine_.forward(batch.x_BT, batch.y_BT);
    clock.end(Phase::kForward);
    engine_.backward(loss);
    clock.end(Phase::kBackward);
    const StepResult result = engine_.step();
    clock.end(Phase::kStep);
    if (result.boundary && !result.committed) throw std::runtime_error(name() + ": step skipped: " + result.reason);
  }
  const auto value = loss.item<float>();
  loss_digest_ = digest64({reinterpret_cast<const char*>(&value), sizeof(value)}, loss_digest_);
}

}  // namespace zeroth::benchmarks
