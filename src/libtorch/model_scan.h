// What a LibTorch model consists of.
#pragma once

#include <zeroth/libtorch/engine.h>
#include <zeroth/libtorch/model_description.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <vector>

namespace zeroth::libtorch {

struct ScannedModel {
  ModelDescription model{};
  std::vector<UnitBase*> wrappers{};  ///< one a unit; null for the root
};

/// What modules say of their parameters, by the parameters' names.
[[nodiscard]] std::map<std::string, ParameterBox> boxes_of(torch::nn::Module& model);

/// Finds the Units of a module and everything in them; see describe_model(). Of the options: groups, trainable_later
/// and box_of.
[[nodiscard]] ScannedModel scan_model(torch::nn::Module& model, const EngineOptions& options);

/// A parameter's name, without the modules that units put around others.
[[nodiscard]] std::string plain_name(const std::string& name);

/// The dtype of a parameter that trains; throws kModel naming `name` for others.
[[nodiscard]] DType dtype_of(const at::Tensor& tensor, const std::string& name);

}  // namespace zeroth::libtorch
