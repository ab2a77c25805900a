// Weights of a LibTorch engine to one safetensors file.
#pragma once

#include <zeroth/engine/engine.h>
#include <zeroth/libtorch/model_description.h>

#include <string>

namespace zeroth::libtorch {

/// Collective; a sync() of all ranks comes before it. Rank 0 reads one flat at a time and writes; all ranks return when
/// the file is there, or throw rank 0's error.
void export_safetensors(const std::string& path, zeroth::Engine& engine, const ModelDescription& model);

}  // namespace zeroth::libtorch
