#include "weights.h"

#include "safetensors_file.h"

#include <zeroth/libtorch/unit.h>

#include <torch/types.h>

#include <cstring>
#include <map>
#include <string>
#include <utility>

namespace gpt {
namespace {

// By the names of an export: without the modules that units put around blocks.
std::map<std::string, torch::Tensor> parameters_of(const Gpt& model) {
  const std::string inner = std::string(".") + zeroth::libtorch::kInnerName;
  std::map<std::string, torch::Tensor> parameters;
  for (const auto& item : model->named_parameters()) {
    std::string name = item.key();
    if (const std::size_t at = name.find(inner); at != std::string::npos) {
      name.erase(at, inner.size());
    }
    parameters.emplace(std::move(name), item.value());
  }
  return parameters;
}

torch::Tensor to_tensor(const StoredTensor& stored) {
  static const std::map<std::string, torch::Dtype> kDtypes{
      {"F64", torch::kFloat64}, {"F32", torch::kFloat32}, {"BF16", torch::kBFloat16}, {"F16", torch::kFloat16}};
  torch::Tensor tensor = torch::empty(stored.shape, kDtypes.at(stored.dtype));
  std::memcpy(tensor.data_ptr(), stored.data.data(), stored.data.size());
  return tensor;
}

}  // namespace

void load_weights(Gpt& model, const std::filesystem::path& path) {
  const torch::NoGradGuard no_grad;
  const SafetensorsFile file(path);
  std::map<std::string, torch::Tensor> parameters = parameters_of(model);
  std::map<std::string, Shape> shapes;
  for (const auto& [name, parameter] : parameters) {
    shapes.emplace(name, parameter.sizes().vec());
  }
  file.require_weights(shapes);
  for (auto& [name, parameter] : parameters) {
    parameter.copy_(to_tensor(file.tensors().at(name)));
  }
}

}  // namespace gpt
