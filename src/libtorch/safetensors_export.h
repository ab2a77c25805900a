// Weights of a LibTorch engine to one safetensors file.
#pragma once

#include <zeroth/engine/engine.h>
#include <zeroth/engine/safetensors.h>
#include <zeroth/libtorch/model_description.h>

#include <ATen/core/Tensor.h>

#include <string>

namespace zeroth::libtorch {

/// Of a tensor under `name` in a file. Throws kModel for one that has no place there.
[[nodiscard]] SafetensorsEntry safetensors_entry(const std::string& name, const at::Tensor& tensor);
/// A copy on the CPU, or the tensor itself, in row-major order.
[[nodiscard]] at::Tensor row_major(const at::Tensor& tensor);

/// Collective; a sync() of all ranks comes before it. Rank 0 reads one flat at a time and writes; all ranks return when
/// the file is there, or throw rank 0's error.
void export_safetensors(const std::string& path, zeroth::Engine& engine, const ModelDescription& model);

}  // namespace zeroth::libtorch
