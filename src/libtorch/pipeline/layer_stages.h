// LayerStages: a list of layers, which stage of a pipeline has which, and the micro-batches of the step that runs.
#pragma once

#include <zeroth/comm/communicator.h>
#include <zeroth/engine/config.h>
#include <zeroth/engine/world.h>
#include <zeroth/libtorch/engine.h>
#include <zeroth/libtorch/pipeline.h>
#include <zeroth/libtorch/pipeline_model.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

class LayerStages {
 public:
  /// Cuts the layers, and takes the parameters of other stages out of `model`. Collective. What it throws: see
  /// PipelineEngine.
  LayerStages(torch::nn::Module& model, std::vector<Layer> layers, const Config& config, const World& world,
              const EngineOptions& options, std::vector<int> bounds);

  /// The options, with what each parameter is of the whole model.
  [[nodiscard]] EngineOptions with_boxes(EngineOptions options) const;
  /// Numbers of the engine's units that have parameters of a chunk, one list a chunk.
  [[nodiscard]] std::vector<std::vector<int>> units_of_chunks(const Runtime& runtime) const;

  /// For the next step, or evaluation. `weights`: of the losses, one a micro-batch, or none.
  void give(std::vector<MicroBatch> batches, std::vector<double> weights = {}) {
    batches_ = std::move(batches);
    weights_ = std::move(weights);
  }
  /// PipelineOptions::aged.
  void age(bool keep);
  /// Throws kMismatch for another number of micro-batches than a step has.
  void require_count(std::size_t count) const;
  /// The layers of a chunk on a micro-batch; a negative number is of an earlier step, see ChunkForward.
  [[nodiscard]] ChunkValues forward(int chunk, int micro_batch, ChunkValues inputs);
  /// While it is on, what the last layer returns is kept, or of a head that stages share its input, and no loss is
  /// wanted of it.
  void keep_outputs(bool on) { keeps_outputs_ = on; }
  /// What was kept, and is given away.
  [[nodiscard]] Tensors take_outputs() { return std::exchange(outputs_, {}); }
  /// What the last layer would have returned of the micro-batch: its head's logits, or the loss of them.
  [[nodiscard]] Tensors end_of_head(const at::Tensor& logits, const MicroBatch& batch) const;

  /// Of all layers.
  [[nodiscard]] std::vector<std::shared_ptr<torch::nn::Module>> modules() const;
  [[nodiscard]] std::string describe() const;
  /// PipelineOptions::buffer_owners.
  [[nodiscard]] std::map<std::string, int> buffer_owners(const torch::nn::Module& model) const;
  /// PipelineOptions::buffers.
  [[nodiscard]] Tensors buffers_of(int chunk) const;
  [[nodiscard]] const StepProgram& program() const { return program_; }
  [[nodiscard]] const std::vector<int>& bounds() const { return bounds_; }
  /// Those of this rank's pipeline, a stage each.
  [[nodiscard]] const Communicator& ranks() const { return *ranks_; }
  /// PipelineOptions::head.
  [[nodiscard]] std::optional<SharedHead> head(const Runtime& runtime) const;
  /// PipelineOptions::copies.
  [[nodiscard]] const std::optional<Communicator>& copies() const { return copies_; }

 private:
  [[nodiscard]] std::span<const Layer> layers_of_chunk(int chunk) const;
  [[nodiscard]] std::map<const at::TensorImpl*, std::set<int>> stages_of_parameters() const;
  /// Each parameter of the model is in a layer, and each of a layer in the model.
  void require_all_parameters(const torch::nn::Module& model) const;
  /// Empties the parameters of other stages, and keeps what they are of the whole model.
  void give_away(torch::nn::Module& model, const EngineOptions& options);
  void require_loss(const Tensors& values) const;
  /// Of a configuration whose stages share it: the last layer is a head, with rows for all, whose parameters no other
  /// layer uses.
  void require_head() const;
  [[nodiscard]] bool is_of_shared_head(const at::Tensor& parameter) const;
  /// That share it: those of pp and tp.
  [[nodiscard]] int ranks_of_head() const;
  /// Of the head, of each rank that shares it, stage after stage.
  [[nodiscard]] std::vector<std::int64_t> shared_rows() const;
  /// Leaves this rank's rows.
  [[nodiscard]] ParameterBox take_rows(const at::Tensor& parameter) const;
  /// What the executor is to know of the head's input; see SharedHead.
  [[nodiscard]] ChunkValues to_head(const Tensors& values, int micro_batch);

  std::vector<Layer> layers_;
  StepProgram program_;
  std::vector<int> bounds_;
  int ranks_of_stage_ = 1;
  bool shares_head_ = false;
  std::optional<RankGroup> beside_;  ///< ranks of a stage that share its rows of the head once more
  std::optional<Communicator> ranks_;
  std::optional<Communicator> copies_;
  std::map<const at::TensorImpl*, ParameterBox> boxes_;
  std::vector<MicroBatch> batches_;
  std::vector<MicroBatch> earlier_;  ///< copies of those of the steps before, as far as this stage's chunks are late
  std::vector<double> weights_;
  bool keeps_outputs_ = false;
  Tensors outputs_;
};

}  // namespace zeroth::libtorch
