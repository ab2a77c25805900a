#include "libtorch/model_scan.h"

#include <algorithm>
#include <map>
#include <utility>

namespace zeroth::libtorch {
namespace {

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

int group_of(const std::vector<ParamGroup>& groups, const std::string& name, const at::Tensor& tensor) {
  for (std::size_t index = 0; index < groups.size(); ++index) {
    if (groups[index].match && groups[index].match(name, tensor)) return static_cast<int>(index) + 1;
  }
  return 0;
}

}  // namespace

ScannedModel scan_model(torch::nn::Module& model, const std::vector<ParamGroup>& groups,
                        const std::function<bool(const std::string&, const at::Tensor&)>& trainable_later) {
  std::vector<UnitPath> paths;
  std::vector<UnitBase*> wrappers{nullptr};
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    auto* wrapper = dynamic_cast<UnitBase*>(item.value().get());
    if (wrapper == nullptr) continue;
    paths.push_back({.path = plain_name(item.key()), .identity = wrapper, .type = wrapper->inner_type().name()});
    if (std::ranges::find(wrappers, wrapper) == wrappers.end()) wrappers.push_back(wrapper);
  }
  std::map<std::string, ParameterBox> boxes;
  for (const auto& item : model.named_modules("", /*include_self=*/true)) {
    const auto* split = dynamic_cast<const SplitModule*>(item.value().get());
    if (split == nullptr) continue;
    const std::string path = plain_name(item.key());
    for (auto& [name, box] : split->boxes()) boxes.emplace(path.empty() ? name : path + "." + name, std::move(box));
  }
  std::vector<NamedParameter> parameters;
  for (const auto& item : model.named_parameters(/*recurse=*/true)) {
    const std::string name = plain_name(item.key());
    const auto later = [&] { return trainable_later && trainable_later(name, item.value()); };
    const bool may_train = item.value().defined() && (group_of(groups, name, item.value()) > 0 || later());
    const auto box = boxes.find(name);
    parameters.push_back({name, item.value(), may_train, box != boxes.end() ? box->second : ParameterBox{}});
  }
  std::vector<NamedBuffer> buffers;
  for (const auto& item : model.named_buffers(/*recurse=*/true)) {
    if (item.value().defined()) buffers.push_back({plain_name(item.key()), item.value()});
  }
  const auto group = [&groups](const std::string& name, const at::Tensor& tensor) {
    return group_of(groups, name, tensor);
  };
  return {describe_model(paths, parameters, std::move(buffers), group), std::move(wrappers)};
}

}  // namespace zeroth::libtorch
