#include "libtorch/model_cast.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string>

namespace zeroth::libtorch {
namespace {

/// The first trainable parameter of the dtype; null if there is none.
const ParamSpec* first_of(const ModelDescription& model, DType dtype) {
  const auto found = std::ranges::find_if(
      model.params, [dtype](const ParamSpec& spec) { return spec.trainable && spec.dtype == dtype; });
  return found == model.params.end() ? nullptr : &*found;
}

void require_no(const ModelDescription& model, DType other, const std::string& key, const std::string& wanted) {
  const ParamSpec* found = first_of(model, other);
  ZR_CHECK(found == nullptr, ErrorCode::kConfig, key + " is enabled, but the model has parameters of another dtype",
           {.where = "libtorch",
            .which = found == nullptr ? "" : found->name,
            .expected = "a model in float32 or " + wanted,
            .got = std::string(name_of(other)),
            .hint = "enable what the model has, or give it in float32"});
}

std::string counted(std::size_t number, const std::string& what) {
  return std::to_string(number) + " " + what + (number == 1 ? "" : "s");
}

}  // namespace

OriginalValues::~OriginalValues() {
  for (const auto& [tensor, value] : values_) tensor.set_data(value);
}

void OriginalValues::cast(const at::Tensor& tensor, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  values_.emplace_back(tensor, tensor.detach());
  tensor.set_data(tensor.detach().to(dtype));
}

std::optional<DType> dtype_to_cast_to(const Config& config, const ModelDescription& model) {
  const bool half = config.fp16.enabled;
  if (!half && !config.bf16) {
    const ParamSpec* found = first_of(model, DType::kFloat16);
    ZR_CHECK(found == nullptr, ErrorCode::kConfig, "a parameter in float16 trains, and no loss scale is configured",
             {.where = "libtorch",
              .which = found == nullptr ? "" : found->name,
              .expected = "fp16.enabled",
              .got = "a configuration without it",
              .hint = "set {\"fp16\": {\"enabled\": true}}, or convert the model: model.to(torch.bfloat16)"});
    return std::nullopt;
  }
  const DType dtype = half ? DType::kFloat16 : DType::kBFloat16;
  const std::string key = half ? "fp16" : "bf16";
  require_no(model, half ? DType::kBFloat16 : DType::kFloat16, key, std::string(name_of(dtype)));
  if (first_of(model, dtype) != nullptr) return std::nullopt;
  const std::string torch_name = half ? "half" : "bfloat16";
  ZR_CHECK(config.runtime.cast, ErrorCode::kConfig,
           key + " is enabled, but the model has no " + std::string(name_of(dtype)) + " parameter",
           {.where = "libtorch",
            .which = key + ".enabled",
            .expected = "a model in " + std::string(name_of(dtype)),
            .got = model.params.empty() ? "no parameters" : std::string(name_of(model.params[0].dtype)),
            .hint = "let the engine cast it (zeroth.cast), or call model.to(torch." + torch_name +
                    ") before the engine is built"});
  return dtype;
}

OriginalValues cast_model(const Config& config, ModelDescription& model, CastLog& log) {
  OriginalValues originals;
  const std::optional<DType> dtype = dtype_to_cast_to(config, model);
  if (!dtype) return originals;
  const at::ScalarType scalar = *dtype == DType::kFloat16 ? at::kHalf : at::kBFloat16;
  std::size_t num_params = 0;
  std::size_t num_buffers = 0;
  std::vector<std::string> kept;
  for (std::size_t param = 0; param < model.params.size(); ++param) {
    if (model.tensors[param].scalar_type() != at::kFloat) continue;
    originals.cast(model.tensors[param], scalar);
    model.params[param].dtype = *dtype;
    ++num_params;
  }
  for (const NamedBuffer& buffer : model.buffers) {
    if (!buffer.tensor.defined() || buffer.tensor.scalar_type() != at::kFloat) continue;
    if (!buffer.persistent) {
      kept.push_back(buffer.name);
      continue;
    }
    originals.cast(buffer.tensor, scalar);
    ++num_buffers;
  }
  log.text = "cast to " + std::string(name_of(*dtype)) + ": " + counted(num_params, "parameter") + ", " +
             counted(num_buffers, "buffer");
  if (kept.empty()) return originals;
  const std::size_t shown = std::min<std::size_t>(kept.size(), 3);
  log.text +=
      "; float32 stays in " + counted(kept.size(), "buffer") + " that " + (kept.size() == 1 ? "is" : "are") +
      " not saved: " + join(std::vector<std::string>(kept.begin(), kept.begin() + static_cast<long>(shown)), ", ") +
      (shown < kept.size() ? ", ..." : "");
  return originals;
}

}  // namespace zeroth::libtorch
