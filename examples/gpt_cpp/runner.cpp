#include "runner.h"

#include <zeroth/libtorch/pipeline_engine.h>

#include <string>
#include <utility>

namespace gpt {
namespace {

using zeroth::libtorch::EngineBase;
using zeroth::libtorch::MicroBatch;

// No weight decay for norms and other vectors. The embedding decays: it is also the output matrix.
zeroth::libtorch::EngineOptions engine_options() {
  zeroth::libtorch::ParamGroup vectors;
  vectors.match = [](const std::string&, const torch::Tensor& parameter) { return parameter.dim() < 2; };
  vectors.weight_decay = 0.0;
  return {.groups = {std::move(vectors)}, .same_batches = {"pp", "sp", "tp"}};
}

class WholeModel final : public Runner {
 public:
  WholeModel(const Gpt& model, const Settings& settings, const zeroth::World& world, std::function<void()> measured)
      : micro_steps_(settings.batch.accumulate),
        data_ranks_(settings.data_ranks),
        world_(world),
        measured_(std::move(measured)),
        engine_(model, settings.config, world, engine_options()) {}

  EngineBase& engine() override { return engine_; }

  Step train(const std::function<Batch(std::int64_t)>& batch_of) override {
    Step step;
    double sum = 0.0;
    for (std::int64_t micro_step = 0; micro_step < micro_steps_; ++micro_step) {
      world_.activity()
          ->at();  // the line that is shown to ranks that wait for this one: its batch may come from a slow disk
      const Batch batch = batch_of(micro_step);
      world_.activity()->at();
      const torch::Tensor loss = engine_.forward(batch.x_BT, batch.y_BT);
      measured_();  // activations are at their peak
      engine_.backward(loss);
      measured_();  // gradients are
      step.result = engine_.step();
      measured_();
      sum += loss.item<double>();
    }
    step.loss = engine_.average(sum / static_cast<double>(micro_steps_));
    return step;
  }

  double evaluate(const std::vector<Batch>& batches, double weights) override {
    const torch::NoGradGuard no_grad;
    double sum = 0.0;
    for (const Batch& batch : batches) {
      sum += batch.weight * engine_.forward(batch.x_BT, batch.y_BT).item().toDouble();
    }
    return engine_.average(sum) * data_ranks_ / weights;
  }

  torch::Tensor logits(const torch::Tensor& x_BT) override {
    const torch::NoGradGuard no_grad;
    return engine_.forward(x_BT, torch::Tensor());
  }

 private:
  std::int64_t micro_steps_;
  double data_ranks_;
  const zeroth::World& world_;
  std::function<void()> measured_;
  zeroth::libtorch::Engine<GptImpl> engine_;
};

class PipelinedModel final : public Runner {
 public:
  PipelinedModel(const Gpt& model, const Settings& settings, const zeroth::World& world, std::function<void()> measured)
      : micro_batches_(settings.batch.accumulate),
        world_(world),
        measured_(std::move(measured)),
        engine_(model.ptr(), Gpt(model)->layers(), settings.config, world, engine_options()) {}

  EngineBase& engine() override { return engine_; }

  Step train(const std::function<Batch(std::int64_t)>& batch_of) override {
    world_.activity()->at();
    std::vector<MicroBatch> batches;
    for (std::int64_t micro_batch = 0; micro_batch < micro_batches_; ++micro_batch) {
      const Batch batch = batch_of(micro_batch);
      batches.push_back({.inputs = {batch.x_BT}, .targets = {batch.y_BT}});
    }
    world_.activity()->at();
    engine_.give(std::move(batches));
    engine_.pipeline().begin();
    for (const zeroth::Action& action : engine_.pipeline().actions()) {
      engine_.pipeline().run(action);
      if (!zeroth::is_message(action.kind)) {
        measured_();
      }
    }
    const zeroth::libtorch::Pipeline::Result result = engine_.pipeline().end();
    return {.result = result.step, .loss = result.loss};
  }

  double evaluate(const std::vector<Batch>& batches, double /*weights*/) override {
    std::vector<MicroBatch> micro_batches;
    std::vector<double> weights;
    for (const Batch& batch : batches) {
      micro_batches.push_back({.inputs = {batch.x_BT}, .targets = {batch.y_BT}});
      weights.push_back(batch.weight);
    }
    return engine_.eval_batch(std::move(micro_batches), std::move(weights));
  }

  torch::Tensor logits(const torch::Tensor& x_BT) override { return engine_.outputs({.inputs = {x_BT}}).front(); }

 private:
  std::int64_t micro_batches_;
  const zeroth::World& world_;
  std::function<void()> measured_;
  zeroth::libtorch::PipelineEngine engine_;
};

}  // namespace

std::unique_ptr<Runner> make_runner(const Gpt& model, const Settings& settings, const zeroth::World& world,
                                    std::function<void()> measured) {
  if (settings.stages > 1) {
    return std::make_unique<PipelinedModel>(model, settings, world, std::move(measured));
  }
  return std::make_unique<WholeModel>(model, settings, world, std::move(measured));
}

}  // namespace gpt
