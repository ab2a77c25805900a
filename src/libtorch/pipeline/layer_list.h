// What a list of layers says of parameters.
#pragma once

#include <zeroth/libtorch/pipeline_model.h>

namespace zeroth::libtorch {

/// The parameters of a layer, each once, in order.
[[nodiscard]] Tensors parameters_of(const Layer& layer);

/// Throws kUsage for no layers, and for one without a forward.
void require_layers(const std::vector<Layer>& layers);

}  // namespace zeroth::libtorch
