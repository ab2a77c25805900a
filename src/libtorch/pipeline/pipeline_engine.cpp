#include "libtorch/pipeline/evaluation_mode.h"
#include "libtorch/pipeline/layer_stages.h"
#include "libtorch/pipeline/stage_values.h"
#include "libtorch/runtime.h"

#include <zeroth/base/error.h>
#include <zeroth/base/log.h>
#include <zeroth/libtorch/pipeline_engine.h>

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace zeroth::libtorch {

namespace {

/// Null without a place.
std::shared_ptr<SavedTensors> saved_tensors_of(Runtime& runtime) {
  const auto& keys = runtime.config().activations;
  if (keys.tier() == "none") return nullptr;
  return SavedTensors::create(runtime.core().activations(), static_cast<std::size_t>(keys.min_bytes));
}

}  // namespace

PipelineEngine::PipelineEngine(std::shared_ptr<torch::nn::Module> model, std::vector<Layer> layers, Config config,
                               const World& world, EngineOptions options, std::vector<int> bounds)
    // Copies: the order in which these are made is not said.
    : PipelineEngine(
          std::make_shared<LayerStages>(*model, std::move(layers), config, world, options, std::move(bounds)), model,
          config, world, options) {}

PipelineEngine::PipelineEngine(std::shared_ptr<LayerStages> stages, std::shared_ptr<torch::nn::Module> model,
                               Config config, const World& world, EngineOptions options)
    : EngineBase(model, std::move(config), world, stages->with_boxes(options)), stages_(std::move(stages)) {
  modules_ = stages_->modules();
  modules_.insert(modules_.begin(), model);
  Logger(world.rank(), world.size(), options.log_level).progress(stages_->describe());
  pipeline_ = std::make_unique<Pipeline>(
      *this, stages_->ranks(),
      PipelineOptions{.program = stages_->program(),
                      .units = stages_->units_of_chunks(*runtime()),
                      .forward =
                          [stages = stages_](int chunk, int micro_batch, ChunkValues inputs) {
                            return stages->forward(chunk, micro_batch, std::move(inputs));
                          },
                      .buffers = [stages = stages_](int chunk) { return stages->buffers_of(chunk); },
                      .aged = [stages = stages_](bool keep) { stages->age(keep); },
                      .saved = saved_tensors_of(*runtime()),
                      .buffer_owners = stages_->buffer_owners(*model),
                      .copies = stages_->copies(),
                      .head = stages_->head(*runtime())});
}

PipelineEngine::PipelineEngine(PipelineEngine&&) noexcept = default;
PipelineEngine& PipelineEngine::operator=(PipelineEngine&&) noexcept = default;
PipelineEngine::~PipelineEngine() = default;

Pipeline::Result PipelineEngine::train_batch(std::vector<MicroBatch> micro_batches) {
  give(std::move(micro_batches));
  const Pipeline::Result result = pipeline_->train_batch();
  stages_->give({});
  return result;
}

double PipelineEngine::eval_batch(std::vector<MicroBatch> micro_batches, std::vector<double> weights) {
  ZR_CHECK(!micro_batches.empty(), ErrorCode::kUsage, "an evaluation without micro-batches",
           {.where = "libtorch.pipeline"});
  const std::size_t count = micro_batches.size();
  const bool fit = std::ranges::all_of(weights, [](double one) { return std::isfinite(one) && one >= 0; });
  ZR_CHECK(fit && (weights.empty() || weights.size() == count), ErrorCode::kUsage,
           "the weights of an evaluation do not fit its micro-batches",
           {.where = "libtorch.pipeline",
            .expected = std::to_string(count) + " finite numbers from 0, or none",
            .got = std::to_string(weights.size()) + " numbers"});
  const bool weighted = !weights.empty();
  const double weight = std::accumulate(weights.begin(), weights.end(), 0.0) / static_cast<double>(count);
  give_stages(std::move(micro_batches), std::move(weights));
  const EvaluationMode evaluation(modules_);
  const double loss = pipeline_->eval_batch(static_cast<int>(count));
  stages_->give({});
  if (!weighted) return loss;
  const double mean_weight = average(weight);
  ZR_CHECK(mean_weight > 0, ErrorCode::kUsage, "all micro-batches of an evaluation have weight 0",
           {.where = "libtorch.pipeline"});
  return loss / mean_weight;
}

Tensors PipelineEngine::outputs(MicroBatch batch) {
  const EvaluationMode evaluation(modules_);
  give_stages({batch});
  stages_->keep_outputs(true);
  try {
    static_cast<void>(pipeline_->eval_batch(1));
  } catch (...) {
    stages_->keep_outputs(false);
    throw;
  }
  stages_->keep_outputs(false);
  stages_->give({});
  Tensors kept = stages_->take_outputs();
  if (pipeline_->program().shares_head()) {
    const at::NoGradGuard no_grad;
    return stages_->end_of_head(pipeline_->logits(kept.empty() ? at::Tensor() : kept[0]), batch);
  }
  return shared_by(pipeline_->program().rank_of_chunk.back(), std::move(kept), stages_->ranks());
}

void PipelineEngine::give(std::vector<MicroBatch> micro_batches) {
  stages_->require_count(micro_batches.size());
  give_stages(std::move(micro_batches));
}

void PipelineEngine::give_stages(std::vector<MicroBatch> micro_batches, std::vector<double> weights) {
  if (compares_batches()) {
    std::vector<NamedTensor> tensors;
    for (std::size_t number = 0; number < micro_batches.size(); ++number) {
      const std::string of = " of micro-batch " + std::to_string(number);
      const auto add = [&](const char* what, const Tensors& values) {
        for (std::size_t index = 0; index < values.size(); ++index)
          tensors.emplace_back(what + std::to_string(index) + of, values[index]);
      };
      add("input ", micro_batches[number].inputs);
      add("target ", micro_batches[number].targets);
    }
    require_same_batch(tensors);
  }
  for (MicroBatch& batch : micro_batches) {
    for (at::Tensor& input : batch.inputs) input = cast_input(std::move(input));
  }
  stages_->give(std::move(micro_batches), std::move(weights));
}

const std::vector<int>& PipelineEngine::bounds() const {
  return stages_->bounds();
}
std::string PipelineEngine::describe() const {
  return stages_->describe();
}

}  // namespace zeroth::libtorch
