// What a list of layers says of parameters.
#pragma once

#include <zeroth/libtorch/pipeline_model.h>

namespace zeroth::libtorch {

/// The parameters of a layer, each once, in order.
[[nodiscard]] Tensors parameters_of(const Layer& layer);

/// What a layer with a head returns: the mean cross entropy, or without targets the logits. Throws kModel, with the
/// layer's name, for targets that do not fit.
[[nodiscard]] Tensors end_of_head(const std::string& name, const CrossEntropyHead& head, const at::Tensor& logits,
                                  const MicroBatch& batch);
/// The targets of a micro-batch, flat. `rows`: that the head's input has. Throws as end_of_head().
[[nodiscard]] at::Tensor targets_of(const std::string& name, const MicroBatch& batch, std::int64_t rows);
/// How many of them count, on all ranks that have parts of the sequence; collective over these.
[[nodiscard]] double targets_that_count(const CrossEntropyHead& head, const at::Tensor& targets);

/// Throws kUsage for no layers, and for one without a forward.
void require_layers(const std::vector<Layer>& layers);

}  // namespace zeroth::libtorch
