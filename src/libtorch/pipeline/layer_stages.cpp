#include "libtorch/pipeline/layer_stages.h"

#include "libtorch/model_scan.h"
#include "libtorch/pipeline/layer_list.h"
#include "libtorch/runtime.h"

#include <zeroth/base/error.h>
#include <zeroth/engine/settings.h>
#include <zeroth/parallel/slices.h>
#include <zeroth/program/passes.h>
#include <zeroth/program/schedules.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace zeroth::libtorch {
namespace {

constexpr const char* kStagesWhere = "libtorch.pipeline";

/// One stage has all rows.
Vocabulary vocabulary_of(const Config& config) {
  if (config.pipeline.vocabulary == "whole" || config.mesh.pp <= 1) return Vocabulary::kNone;
  return config.pipeline.vocabulary == "one_barrier" ? Vocabulary::kOneBarrier : Vocabulary::kTwoBarriers;
}

StepProgram program_of(const Config& config, int world) {
  const StepProgram schedule = make_schedule(config.pipeline.schedule, {.ranks = config.mesh.pp,
                                                                        .micro_batches = micro_steps_of(config, world),
                                                                        .chunks_per_rank = config.pipeline.chunks,
                                                                        .inexact = true});  // its name says so
  const std::string_view unshard = unshard_of(config);
  const bool recomputes = config.pipeline.recomputes_chunks();
  return lower(schedule, {.gathers = unshard == "step"          ? Gathers::kKept
                                     : unshard == "micro_batch" ? Gathers::kPerMicroBatch
                                                                : Gathers::kNone,
                          .recompute = recomputes,
                          .offload_activations = recomputes && config.activations.tier() != "none",
                          .vocabulary = vocabulary_of(config)});
}

/// The ranks of the mesh; a pipeline of one stage is an axis too.
Mesh mesh_with_stages(const Config& config, const World& world) {
  MeshSpec axes = mesh_of(config, world.size());
  if (config.mesh.pp <= 1) axes.axes.insert(axes.axes.begin(), {.name = std::string(kPipelineAxis), .size = 1});
  return world.mesh(axes, make_comm_options(config, world.size()));
}

void require_bounds(const std::vector<int>& bounds, int chunks, std::size_t layers) {
  std::string text;
  for (const int bound : bounds) text += (text.empty() ? "" : ", ") + std::to_string(bound);
  const bool fits = bounds.size() == static_cast<std::size_t>(chunks) + 1 && bounds.front() == 0 &&
                    bounds.back() == static_cast<int>(layers) &&
                    std::ranges::adjacent_find(bounds, std::greater_equal()) == bounds.end();
  ZR_CHECK(fits, ErrorCode::kUsage, "the bounds of chunks do not fit the layers",
           {.where = kStagesWhere,
            .which = "bounds",
            .expected = "0, then the first layer of each other chunk, then " + std::to_string(layers) + ": " +
                        std::to_string(chunks + 1) + " ascending numbers",
            .got = text});
}

/// Rank 0's bounds, for ranks that share matrices may have different parts, and so different costs. `given`: they are
/// the user's, and must be alike.
std::vector<int> agree(std::vector<int> bounds, bool given, const Communicator& world) {
  std::vector<std::int64_t> first(bounds.begin(), bounds.end());
  world.broadcast(std::span(first), 0);
  const std::vector<int> agreed(first.begin(), first.end());
  const bool differ = agreed.back() != bounds.back() || (given && agreed != bounds);
  std::int64_t others = differ ? 1 : 0;
  world.all_reduce(std::span(&others, 1));
  ZR_CHECK(others == 0, ErrorCode::kMismatch, "ranks cut the model in different ways",
           {.where = kStagesWhere,
            .who = std::to_string(others) + " of " + std::to_string(world.size()) + " ranks",
            .expected = "the layers and bounds of rank 0",
            .hint = "give all ranks the same list of layers and the same bounds"});
  return agreed;
}

/// Nothing of it but its dtype, its device and its number of dimensions.
void drop_values(const at::Tensor& parameter) {
  std::vector<std::int64_t> shape = parameter.sizes().vec();
  shape[0] = 0;
  at::Tensor(parameter).set_data(at::empty(shape, parameter.options().requires_grad(false)));
}

ParameterBox box_on_stages(const at::Tensor& parameter, ParameterBox box, std::vector<int> stages) {
  if (box.logical_shape.empty()) {
    box.logical_shape = parameter.sizes().vec();
    box.offset.assign(box.logical_shape.size(), 0);
  }
  box.axes.stages = std::move(stages);
  return box;
}

std::string look_of(const Tensors& values) {
  std::string text;
  for (const at::Tensor& tensor : values) {
    text += (text.empty() ? "" : ", ") +
            (tensor.defined() ? tensor.toString() + " " + c10::str(tensor.sizes()) : std::string("undefined"));
  }
  return text.empty() ? "no tensors" : text;
}

/// What torch throws says operator and shapes, and not in which layer of which micro-batch.
Tensors run(const Layer& layer, const Tensors& values, const MicroBatch& batch, int micro_batch) {
  try {
    return layer.forward(values, batch);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    throw Error(ErrorCode::kUser, "a layer of a pipeline failed: " + error_of(error).message(),
                {.where = kStagesWhere,
                 .which = "layer " + layer.name + ", micro-batch " + std::to_string(micro_batch),
                 .got = "the values " + look_of(values),
                 .hint = "a layer takes what the layer before it returns, the first one MicroBatch::inputs"});
  }
}

}  // namespace

LayerStages::LayerStages(torch::nn::Module& model, std::vector<Layer> layers, const Config& config, const World& world,
                         const EngineOptions& options, std::vector<int> bounds)
    : layers_(std::move(layers)) {
  require_layers(layers_);
  config.validate();
  program_ = program_of(config, world.size());
  shares_head_ = program_.shares_head();
  if (shares_head_) layers_.back().cost = 0.0;  // all stages have a part of it
  const bool given = !bounds.empty();
  if (given) {
    require_bounds(bounds, program_.chunks(), layers_.size());
  } else {
    bounds = cut(layers_, program_.chunks(), config.pipeline.split);
  }
  require_all_parameters(model);
  const Mesh mesh = mesh_with_stages(config, world);
  bounds_ = agree(std::move(bounds), given, mesh.world());
  ranks_of_stage_ = world.size() / program_.ranks();
  ranks_.emplace(mesh.axis(kPipelineAxis));
  if (shares_head_ && config.mesh.tp > 1) beside_.emplace(mesh.axis("tp"));
  if (shares_head_) require_head();
  if (config.pipeline.scatter && config.mesh.tp > 1 && config.mesh.norms == "whole") copies_.emplace(mesh.axis("tp"));
  if (program_.ranks() > 1) give_away(model, options);
}

void LayerStages::require_all_parameters(const torch::nn::Module& model) const {
  std::set<const at::TensorImpl*> listed;
  std::set<const at::TensorImpl*> known;
  for (const Layer& layer : layers_) {
    for (const at::Tensor& parameter : parameters_of(layer)) listed.insert(parameter.unsafeGetTensorImpl());
  }
  for (const auto& item : model.named_parameters(/*recurse=*/true)) {
    if (!item.value().defined()) continue;
    known.insert(item.value().unsafeGetTensorImpl());
    ZR_CHECK(listed.contains(item.value().unsafeGetTensorImpl()), ErrorCode::kModel,
             "a parameter of the model is in no layer of its pipeline",
             {.where = kStagesWhere,
              .which = plain_name(item.key()),
              .expected = "each parameter in the layers that use it",
              .hint = "add its module to Layer::modules, or the parameter to Layer::parameters"});
  }
  for (const Layer& layer : layers_) {
    for (const at::Tensor& parameter : parameters_of(layer)) {
      ZR_CHECK(known.contains(parameter.unsafeGetTensorImpl()), ErrorCode::kModel,
               "a layer of the pipeline has a parameter that the model has not",
               {.where = kStagesWhere,
                .which = "layer " + layer.name + ", a parameter of " + c10::str(parameter.sizes()),
                .hint = "register the layer's modules in the model, with register_module()"});
    }
  }
}

void LayerStages::require_head() const {
  const Layer& last = layers_.back();
  ZR_CHECK(last.head.has_value(), ErrorCode::kModel, "the last layer of a pipeline is no head that stages can share",
           {.where = kStagesWhere,
            .which = "layer " + last.name,
            .expected = "cross_entropy_head()",
            .got = "another layer",
            .hint = "or zeroth.pipeline.vocabulary = \"whole\""});
  for (std::size_t number = 0; number + 1 < layers_.size(); ++number) {
    const bool tied = std::ranges::any_of(parameters_of(layers_[number]),
                                          [&](const at::Tensor& one) { return is_of_shared_head(one); });
    ZR_CHECK(!tied, ErrorCode::kModel, "stages cannot share a head whose parameters another layer uses",
             {.where = kStagesWhere,
              .which = "layer " + last.name,
              .expected = "a weight of its own",
              .got = "one that layer " + layers_[number].name + " uses, too",
              .hint = "zeroth.pipeline.vocabulary = \"whole\"; zeroth.pipeline() of Python shares tied heads"});
  }
  const std::int64_t rows = last.head->weight.size(0);
  const int ranks = ranks_of_head();
  ZR_CHECK(rows >= ranks, ErrorCode::kModel, "a head has fewer rows than ranks that share it",
           {.where = kStagesWhere,
            .which = "layer " + last.name,
            .expected = std::to_string(ranks) + " or more, one for each rank of pp and tp",
            .got = std::to_string(rows)});
}

int LayerStages::ranks_of_head() const {
  return ranks_->size() * (beside_ ? beside_->size() : 1);
}

bool LayerStages::is_of_shared_head(const at::Tensor& parameter) const {
  if (!shares_head_) return false;
  const CrossEntropyHead& head = *layers_.back().head;
  return parameter.is_same(head.weight) || (head.bias.defined() && parameter.is_same(head.bias));
}

ParameterBox LayerStages::take_rows(const at::Tensor& parameter) const {
  const int own = beside_ ? ranks_->rank() * beside_->size() + beside_->rank() : ranks_->rank();
  const std::vector<std::int64_t> rows = slice_sizes(parameter.size(0), ranks_of_head());
  const std::int64_t begin = std::accumulate(rows.begin(), rows.begin() + own, std::int64_t{0});
  ParameterBox box{.logical_shape = parameter.sizes().vec(),
                   .offset = std::vector<std::int64_t>(static_cast<std::size_t>(parameter.dim()), 0),
                   .axes = {.distinct = beside_ ? "tp" : std::string(kPipelineAxis), .stages = {ranks_->rank()}}};
  box.offset[0] = begin;
  at::Tensor(parameter).set_data(parameter.detach().narrow(0, begin, rows[static_cast<std::size_t>(own)]).clone());
  return box;
}

std::vector<std::int64_t> LayerStages::shared_rows() const {
  const ParameterBox& whole = boxes_.at(layers_.back().head->weight.unsafeGetTensorImpl());
  return slice_sizes(whole.logical_shape[0], ranks_of_head());
}

std::optional<SharedHead> LayerStages::head(const Runtime& runtime) const {
  if (!shares_head_) return std::nullopt;
  const CrossEntropyHead& own = *layers_.back().head;
  return SharedHead{.unit = runtime.units_of({own.weight}).at(0),
                    .weight = own.weight,
                    .bias = own.bias,
                    .rows = shared_rows(),
                    .beside = beside_};
}

ChunkValues LayerStages::to_head(const Tensors& values, int micro_batch) {
  const Layer& last = layers_.back();
  const bool fits = values.size() == 1 && values[0].defined() && values[0].dim() > 0;
  ZR_CHECK(fits, ErrorCode::kModel, "the head that stages share is given other values than its input",
           {.where = kStagesWhere,
            .which = "layer " + last.name,
            .expected = "one tensor, [..., features]",
            .got = look_of(values)});
  const at::Tensor& input = values[0];
  at::Tensor numbers = at::zeros({3}, at::kDouble);  // factor, constant, parts
  numbers[2] = last.head->sequence ? last.head->sequence->size() : 1;
  if (keeps_outputs_) {
    outputs_ = values;
    const at::Tensor none = at::empty({0}, input.options().dtype(at::kLong));
    return {.tensors = {input, none, none, numbers}};
  }
  const at::NoGradGuard no_grad;
  const MicroBatch& batch = batches_[static_cast<std::size_t>(micro_batch)];
  const at::Tensor targets =
      targets_of(last.name, batch,
                 c10::multiply_integers(input.sizes().slice(0, static_cast<std::size_t>(input.dim()) - 1)))
          .to(input.device());
  const at::Tensor rows = targets.ne(last.head->ignore_index).nonzero().squeeze(1);
  const double weight = weights_.empty() ? 1.0 : weights_[static_cast<std::size_t>(micro_batch)];
  numbers[0] = weight / targets_that_count(*last.head, targets);  // no number without any, as the mean of none
  return {.tensors = {input, rows, targets.index_select(0, rows), numbers}};
}

std::span<const Layer> LayerStages::layers_of_chunk(int chunk) const {
  const auto begin = static_cast<std::size_t>(bounds_[static_cast<std::size_t>(chunk)]);
  const auto end = static_cast<std::size_t>(bounds_[static_cast<std::size_t>(chunk) + 1]);
  return std::span(layers_).subspan(begin, end - begin);
}

std::map<const at::TensorImpl*, std::set<int>> LayerStages::stages_of_parameters() const {
  std::map<const at::TensorImpl*, std::set<int>> stages;
  for (int chunk = 0; chunk < program_.chunks(); ++chunk) {
    for (const Layer& layer : layers_of_chunk(chunk)) {
      for (const at::Tensor& parameter : parameters_of(layer))
        stages[parameter.unsafeGetTensorImpl()].insert(program_.rank_of_chunk[static_cast<std::size_t>(chunk)]);
    }
  }
  return stages;
}

void LayerStages::give_away(torch::nn::Module& model, const EngineOptions& options) {
  const std::map<const at::TensorImpl*, std::set<int>> stages = stages_of_parameters();
  const std::map<std::string, ParameterBox> own = boxes_of(model);  // while the parameters have their sizes
  for (const auto& item : model.named_parameters(/*recurse=*/true)) {
    const at::Tensor& parameter = item.value();
    if (!parameter.defined() || boxes_.contains(parameter.unsafeGetTensorImpl())) continue;
    const std::string name = plain_name(item.key());
    if (is_of_shared_head(parameter)) {
      boxes_.emplace(parameter.unsafeGetTensorImpl(), take_rows(parameter));
      continue;
    }
    const auto known = own.find(name);
    ParameterBox box = known != own.end() ? known->second : ParameterBox{};
    if (options.box_of) box = options.box_of(name, parameter).value_or(std::move(box));
    const std::set<int>& users = stages.at(parameter.unsafeGetTensorImpl());
    std::vector<int> on(users.begin(), users.end());
    if (parameter.dim() == 0) {  // no box of it is empty
      on.resize(static_cast<std::size_t>(program_.ranks()));
      std::iota(on.begin(), on.end(), 0);
    }
    const bool here = std::ranges::find(on, ranks_->rank()) != on.end();
    boxes_.emplace(parameter.unsafeGetTensorImpl(), box_on_stages(parameter, std::move(box), std::move(on)));
    if (!here) drop_values(parameter);
  }
}

EngineOptions LayerStages::with_boxes(EngineOptions options) const {
  if (program_.ranks() == 1) return options;
  options.box_of = [boxes = boxes_](const std::string&, const at::Tensor& parameter) -> std::optional<ParameterBox> {
    const auto found = boxes.find(parameter.unsafeGetTensorImpl());
    return found == boxes.end() ? std::nullopt : std::optional(found->second);
  };
  return options;
}

std::vector<std::vector<int>> LayerStages::units_of_chunks(const Runtime& runtime) const {
  std::vector<std::vector<int>> units;
  for (int chunk = 0; chunk < program_.chunks(); ++chunk) {
    Tensors parameters;
    for (const Layer& layer : layers_of_chunk(chunk)) {
      for (const at::Tensor& parameter : parameters_of(layer))
        if (!is_of_shared_head(parameter)) parameters.push_back(parameter);  // V_ actions use them
    }
    units.push_back(runtime.units_of(parameters));
  }
  return units;
}

std::map<std::string, int> LayerStages::buffer_owners(const torch::nn::Module& model) const {
  std::map<const at::TensorImpl*, int> first;  // stage
  for (int chunk = 0; chunk < program_.chunks(); ++chunk) {
    const int stage = program_.rank_of_chunk[static_cast<std::size_t>(chunk)];
    for (const Layer& layer : layers_of_chunk(chunk)) {
      for (const auto& module : layer.modules) {
        for (const at::Tensor& buffer : module->buffers(/*recurse=*/true)) {
          int& known = first.try_emplace(buffer.unsafeGetTensorImpl(), stage).first->second;
          known = std::min(known, stage);
        }
      }
    }
  }
  std::map<std::string, int> owners;
  for (const auto& item : model.named_buffers(/*recurse=*/true)) {
    const auto found = first.find(item.value().unsafeGetTensorImpl());
    // The pipeline's axis is the outermost.
    if (found != first.end() && found->second > 0)
      owners.emplace(plain_name(item.key()), found->second * ranks_of_stage_);
  }
  return owners;
}

Tensors LayerStages::buffers_of(int chunk) const {
  Tensors found;
  std::set<const at::TensorImpl*> known;
  for (const Layer& layer : layers_of_chunk(chunk)) {
    for (const auto& module : layer.modules) {
      for (const at::Tensor& buffer : module->buffers(/*recurse=*/true)) {
        if (buffer.defined() && known.insert(buffer.unsafeGetTensorImpl()).second) found.push_back(buffer);
      }
    }
  }
  return found;
}

void LayerStages::require_count(std::size_t count) const {
  ZR_CHECK(count == static_cast<std::size_t>(program_.micro_batches), ErrorCode::kMismatch,
           "a stage of the pipeline has another number of micro-batches than a step",
           {.where = kStagesWhere,
            .who = "stage " + std::to_string(ranks_->rank()) + " of " + std::to_string(ranks_->size()),
            .expected = "gradient_accumulation_steps, " + std::to_string(program_.micro_batches),
            .got = std::to_string(count)});
}

void LayerStages::age(bool keep) {
  int late = 0;
  for (const int chunk : program_.chunks_of(ranks_->rank()))
    late = std::max(late, program_.late[static_cast<std::size_t>(chunk)]);
  if (!keep) earlier_.clear();
  if (!keep || late == 0) return;
  // Copies: loaders fill their memory anew.
  const auto copied = [](Tensors tensors) {
    for (at::Tensor& tensor : tensors)
      if (tensor.defined()) tensor = tensor.clone();
    return tensors;
  };
  for (const MicroBatch& batch : batches_)
    earlier_.push_back({.inputs = copied(batch.inputs), .targets = copied(batch.targets)});
  const std::size_t most = static_cast<std::size_t>(late) * static_cast<std::size_t>(program_.micro_batches);
  if (earlier_.size() > most) earlier_.erase(earlier_.begin(), earlier_.end() - static_cast<std::ptrdiff_t>(most));
}

ChunkValues LayerStages::forward(int chunk, int micro_batch, ChunkValues inputs) {
  const int numbers_of_earlier = -static_cast<int>(earlier_.size());
  ZR_CHECK(micro_batch >= numbers_of_earlier && micro_batch < static_cast<int>(batches_.size()), ErrorCode::kUsage,
           "a pipeline has no such micro-batch",
           {.where = kStagesWhere,
            .which = "micro-batch " + std::to_string(micro_batch),
            .got = std::to_string(batches_.size()) + " of them",
            .hint = "give() them before the step begins"});
  const MicroBatch& batch = micro_batch < 0 ? earlier_[earlier_.size() - static_cast<std::size_t>(-micro_batch)]
                                            : batches_[static_cast<std::size_t>(micro_batch)];
  Tensors values = chunk == 0 ? batch.inputs : std::move(inputs.tensors);
  const bool ends = chunk + 1 == program_.chunks();
  std::span<const Layer> layers = layers_of_chunk(chunk);
  if (ends && shares_head_) layers = layers.first(layers.size() - 1);
  for (const Layer& layer : layers) values = run(layer, values, batch, micro_batch);
  if (ends && shares_head_) return to_head(values, micro_batch);
  if (ends) {
    if (keeps_outputs_) {
      outputs_ = std::move(values);
      values = {at::zeros({1})};
    }
    require_loss(values);
    if (!weights_.empty()) values[0] = values[0].to(at::kDouble) * weights_[static_cast<std::size_t>(micro_batch)];
  }
  return {.tensors = std::move(values)};
}

void LayerStages::require_loss(const Tensors& values) const {
  const bool any = !values.empty() && values[0].defined();
  ZR_CHECK(any && values[0].numel() == 1, ErrorCode::kModel, "the last layer of a pipeline returns no loss",
           {.where = kStagesWhere,
            .which = "layer " + layers_.back().name,
            .expected = "a tensor of one element, as the first one",
            .got = any ? look_of({values[0]}) : "no tensor",
            .hint = "outputs() runs models whose last layer returns something else"});
}

Tensors LayerStages::end_of_head(const at::Tensor& logits, const MicroBatch& batch) const {
  return libtorch::end_of_head(layers_.back().name, *layers_.back().head, logits, batch);
}

std::vector<std::shared_ptr<torch::nn::Module>> LayerStages::modules() const {
  std::vector<std::shared_ptr<torch::nn::Module>> found;
  for (const Layer& layer : layers_) found.insert(found.end(), layer.modules.begin(), layer.modules.end());
  return found;
}

std::string LayerStages::describe() const {
  std::string text = "pipeline of " + std::to_string(program_.ranks()) + " stages, " +
                     std::to_string(program_.chunks()) + " chunks, " + std::to_string(program_.micro_batches) +
                     " micro-batches a step" + (program_.inexact ? ", inexact: gradients are late" : "");
  for (int stage = 0; stage < program_.ranks(); ++stage) {
    text += "\n  stage " + std::to_string(stage) + ":";
    for (const int chunk : program_.chunks_of(stage)) {
      const std::span<const Layer> own = layers_of_chunk(chunk);
      text += (text.back() == ':' ? " chunk " : "; chunk ") + std::to_string(chunk) + ": " + own.front().name;
      if (own.size() > 1) text += " to " + own.back().name;
    }
  }
  if (shares_head_) {
    const std::vector<std::int64_t> rows = shared_rows();
    text += "\n  all stages: " + layers_.back().name + ", " + c10::str(c10::IntArrayRef(rows)) + " rows";
  }
  return text;
}

}  // namespace zeroth::libtorch
