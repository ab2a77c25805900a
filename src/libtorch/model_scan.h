// What a LibTorch model consists of, in the core's words.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include <zeroth/libtorch/engine.h>
#include <zeroth/shard/param_spec.h>

namespace zeroth::libtorch {

struct ScannedModel {
  std::vector<ParamSpec> params{};
  std::vector<at::Tensor> tensors{};      ///< one a spec: the user's own parameter
  std::vector<UnitSpec> units{};          ///< 0: root
  std::vector<UnitBase*> wrappers{};      ///< one a unit; null for the root
  std::vector<std::pair<std::string, at::Tensor>> buffers{};
};

/// Finds units, parameters, tied weights and groups. A parameter belongs to the innermost unit around it; one that is used in
/// several units belongs to the root. Throws kModel naming what cannot be trained: sparse, meta, overlapping, off-CPU or oddly
/// typed parameters.
[[nodiscard]] ScannedModel scan_model(torch::nn::Module& model, const std::vector<ParamGroup>& groups);

/// The core's dtype of a tensor; throws kModel naming `name` for others.
[[nodiscard]] DType dtype_of(const at::Tensor& tensor, const std::string& name);

}  // namespace zeroth::libtorch
