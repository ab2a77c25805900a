// PipelineEngine: the engine of a model that stages of a pipeline train.
//
//   Net net;                                                          // on every rank, from the same seed
//   PipelineEngine engine(net.ptr(), layers, config, world);          // layers: pipeline_model.h
//   auto [step, loss] = engine.train_batch(std::move(micro_batches)); // gradient_accumulation_steps of them
//   double held_out = engine.eval_batch(std::move(others));
//   engine.save("checkpoints");                                       // as every engine's: of the whole model
//
// The configuration says how: zeroth.mesh.pp stages; zeroth.pipeline.schedule, .chunks, .split, .unshard. Beside the
// stages there may be data-parallel ranks, and tensor- and sequence-parallel ones, whose layers are made for them
// (tensor_parallel.h) before.
//
// A rank keeps the parameters of its stage. All others stay in the module under their names, with the first size 0 and
// without memory. engine.full(name), save(), load() and export_safetensors() are of the whole model.
#pragma once

#include <zeroth/libtorch/engine.h>
#include <zeroth/libtorch/pipeline.h>
#include <zeroth/libtorch/pipeline_model.h>

#include <memory>
#include <string>
#include <vector>

namespace zeroth::libtorch {

class LayerStages;

/// One thread at a time.
class PipelineEngine : public EngineBase {
 public:
  /// Takes the parameters of other stages out of `model`, then makes the engine; shares the model. Collective, blocks.
  /// All ranks give the same layers. With one stage, pp = 1, it is an engine with the same calls.
  ///
  /// `bounds`: of the chunks, as of cut(), the same on all ranks; empty: by zeroth.pipeline.split. Chunk c is on stage
  /// c % p of p; where a schedule places them as a V, on c or 2p - 1 - c.
  ///
  /// `options`: functions that take a parameter see those of other stages as they are here, with their number of
  /// dimensions and their dtype; and all ranks must answer alike.
  ///
  /// Throws, before it changes the model: kUsage for no layers, bounds that do not fit, and a schedule that there is
  /// not; kModel for a parameter of the model that is in no layer, one of a layer that the model has not, and a last
  /// layer that the stages are to share and cannot; kConfig for a mesh that does not fit the ranks; kMismatch for ranks
  /// with other layers or bounds. Then what other engines throw.
  PipelineEngine(std::shared_ptr<torch::nn::Module> model, std::vector<Layer> layers, Config config, const World& world,
                 EngineOptions options = {}, std::vector<int> bounds = {});
  PipelineEngine(PipelineEngine&&) noexcept;
  PipelineEngine& operator=(PipelineEngine&&) noexcept;
  ~PipelineEngine();

  /// A step over gradient_accumulation_steps micro-batches: all stages of a pipeline give the same ones. Their inputs,
  /// not their targets, are cast as fp16.auto_cast and bf16.auto_cast say: here and in the calls below. Collective,
  /// blocks. Throws kMismatch for another number of them, kModel for a last layer without a loss, kUser with the layer
  /// and its micro-batch for what torch refuses in a layer's forward, and what backward() and step() throw.
  Pipeline::Result train_batch(std::vector<MicroBatch> micro_batches);
  /// The mean loss over any number of micro-batches, at least one, without gradients, on all ranks. Modules are
  /// in eval() meanwhile; afterwards each of them trains, or does not, as before. `weights`: one a
  /// micro-batch, from 0, the same on all stages of a pipeline, for a mean over samples where micro-batches differ in
  /// size; empty: all count alike. Collective, blocks. Throws kUsage for weights that do not fit, or are 0 on all
  /// ranks.
  double eval_batch(std::vector<MicroBatch> micro_batches, std::vector<double> weights = {});
  /// What the last layer returns, on all stages, without gradients, in eval() as there. It may be anything, not only a
  /// loss: logits, where there are no targets. Collective over all ranks, blocks; each pipeline has its own
  /// micro-batch. Wire: the outputs once to each stage; of a head that stages share, its input, and each stage's logits
  /// to all others.
  Tensors outputs(MicroBatch batch);

  /// For loops of the caller's own: give(micro_batches), then pipeline().begin(), run() of each action, and end().
  void give(std::vector<MicroBatch> micro_batches);
  [[nodiscard]] Pipeline& pipeline() { return *pipeline_; }
  [[nodiscard]] const StepProgram& program() const { return pipeline_->program(); }

  [[nodiscard]] const std::vector<int>& bounds() const;
  /// "pipeline of 2 stages, 2 chunks, 4 micro-batches a step", and a line a stage with its layers.
  [[nodiscard]] std::string describe() const;

 private:
  void give_stages(std::vector<MicroBatch> micro_batches, std::vector<double> weights = {});
  PipelineEngine(std::shared_ptr<LayerStages> stages, std::shared_ptr<torch::nn::Module> model, Config config,
                 const World& world, EngineOptions options);

  std::vector<std::shared_ptr<torch::nn::Module>> modules_;  ///< the model, and those of the layers
  std::shared_ptr<LayerStages> stages_;
  std::unique_ptr<Pipeline> pipeline_;
};

}  // namespace zeroth::libtorch
