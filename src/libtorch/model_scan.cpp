#include "libtorch/model_scan.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

namespace zeroth::libtorch {
namespace {

int group_of(const std::vector<ParamGroup>& groups, const std::string& name, const at::Tensor& tensor) {
  for (std::size_t index = 0; index < groups.size(); ++index) {
    if (groups[index].match && groups[index].match(name, tensor)) return static_cast<int>(index) + 1;
  }
  return 0;
}

}  // namespace

/// "blocks.3.zeroth_inner.attn.weight" -> "blocks.3.attn.weight"
std::string plain_name(const std::string& name) {
  std::string result;
  std::size_t begin = 0;
  while (begin <= name.size()) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    if (part != kInnerName) result += (result.empty() ? "" : ".") + part;
    begin = end + 1;
  }
  return result;
}

std::map<std::string, ParameterBox> boxes_of(torch::nn::Module& model) {
  std::map<std::string, ParameterBox> boxes;
  for (const auto& item : model.named_modules("", /*include_self=*/true)) {
    const auto* split = dynamic_cast<const SplitModule*>(item.value().get());
    if (split == nullptr) continue;
    const std::string path = plain_name(item.key());
    for (auto& [name, box] : split->boxes()) boxes.emplace(path.empty() ? name : path + "." + name, std::move(box));
  }
  return boxes;
}

ScannedModel scan_model(torch::nn::Module& model, const EngineOptions& options) {
  std::vector<UnitPath> paths;
  std::vector<UnitBase*> wrappers{nullptr};
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    auto* wrapper = dynamic_cast<UnitBase*>(item.value().get());
    if (wrapper == nullptr) continue;
    paths.push_back({.path = plain_name(item.key()), .identity = wrapper, .type = wrapper->inner_type().name()});
    if (std::ranges::find(wrappers, wrapper) == wrappers.end()) wrappers.push_back(wrapper);
  }
  const std::map<std::string, ParameterBox> boxes = boxes_of(model);
  const auto box_of = [&](const std::string& name, const at::Tensor& tensor) {
    std::optional<ParameterBox> given =
        options.box_of && tensor.defined() ? options.box_of(name, tensor) : std::nullopt;
    if (given) return *std::move(given);
    const auto own = boxes.find(name);
    return own != boxes.end() ? own->second : ParameterBox{};
  };
  std::vector<NamedParameter> parameters;
  for (const auto& item : model.named_parameters(/*recurse=*/true)) {
    const std::string name = plain_name(item.key());
    const auto later = [&] { return options.trainable_later && options.trainable_later(name, item.value()); };
    const bool may_train = item.value().defined() && (group_of(options.groups, name, item.value()) > 0 || later());
    parameters.push_back({name, item.value(), may_train, box_of(name, item.value())});
  }
  std::vector<NamedBuffer> buffers;
  for (const auto& item : model.named_buffers(/*recurse=*/true)) {
    if (item.value().defined()) buffers.push_back({plain_name(item.key()), item.value()});
  }
  const auto group = [&options](const std::string& name, const at::Tensor& tensor) {
    return group_of(options.groups, name, tensor);
  };
  return {describe_model(paths, parameters, std::move(buffers), group), std::move(wrappers)};
}

}  // namespace zeroth::libtorch
