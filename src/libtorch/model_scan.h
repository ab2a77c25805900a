// What a LibTorch model consists of.
#pragma once

#include <zeroth/libtorch/engine.h>
#include <zeroth/libtorch/model_description.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

namespace zeroth::libtorch {

struct ScannedModel {
  ModelDescription model{};
  std::vector<UnitBase*> wrappers{};  ///< one a unit; null for the root
};

/// Finds the Units of a module and everything in them; see describe_model().
[[nodiscard]] ScannedModel scan_model(
    torch::nn::Module& model, const std::vector<ParamGroup>& groups,
    const std::function<bool(const std::string& name, const at::Tensor& parameter)>& trainable_later);

/// The dtype of a parameter that trains; throws kModel naming `name` for others.
[[nodiscard]] DType dtype_of(const at::Tensor& tensor, const std::string& name);

}  // namespace zeroth::libtorch
