#include "libtorch/model_scan.h"

#include <algorithm>
#include <map>
#include <typeindex>
#include <unordered_map>

#include <zeroth/base/error.h>

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

void check_trainable_kind(const at::Tensor& tensor, const std::string& name) {
  const auto refuse = [&name](const std::string& got, const std::string& hint) {
    throw Error(ErrorCode::kModel,
                "a parameter cannot be partitioned",
                {.where = "libtorch.scan", .which = name, .expected = "a dense CPU tensor", .got = got, .hint = hint});
  };
  if (tensor.is_meta()) refuse("a meta tensor (shape without memory)", "materialise it before the engine is built");
  if (tensor.layout() != at::kStrided) {
    refuse(std::string("layout ") + (tensor.layout() == at::kSparse ? "sparse" : "not strided"),
           "use to_dense(), or sparse=false in the embedding");
  }
  if (!tensor.is_cpu()) refuse("device " + tensor.device().str(), "this build trains on the CPU; move the model there");
  if (!tensor.is_non_overlapping_and_dense()) {
    refuse("strides with gaps or overlap", "make it contiguous() before it becomes a parameter");
  }
}

std::vector<std::int64_t> shape_of(const at::Tensor& tensor) { return tensor.sizes().vec(); }

int group_of(const std::vector<ParamGroup>& groups, const std::string& name, const at::Tensor& tensor) {
  for (std::size_t index = 0; index < groups.size(); ++index) {
    if (groups[index].match && groups[index].match(name, tensor)) return static_cast<int>(index) + 1;
  }
  return 0;
}

/// The class of units with most members that look alike; members of it share the ring of slots.
void mark_repeated(ScannedModel& scanned) {
  const auto look = [&](std::size_t unit) {
    std::string text = scanned.wrappers[unit]->inner_type().name();
    for (const int param : scanned.units[unit].params) {
      const ParamSpec& spec = scanned.params[static_cast<std::size_t>(param)];
      text += "|" + std::string(name_of(spec.dtype));
      for (const std::int64_t extent : spec.shape) text += "," + std::to_string(extent);
    }
    return text;
  };
  std::map<std::string, std::vector<std::size_t>> classes;
  for (std::size_t unit = 1; unit < scanned.units.size(); ++unit) classes[look(unit)].push_back(unit);
  const auto largest = std::ranges::max_element(
      classes, [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  if (largest == classes.end() || largest->second.size() < 2) return;
  for (const std::size_t unit : largest->second) scanned.units[unit].repeated = true;
}

/// The longest common prefix that ends with a dot, or "".
std::string common_path(const std::string& one, const std::string& other) {
  const auto differ = std::ranges::mismatch(one, other);
  const std::string shared(one.begin(), differ.in1);
  return shared.substr(0, shared.rfind('.') + 1);
}

}  // namespace

DType dtype_of(const at::Tensor& tensor, const std::string& name) {
  switch (tensor.scalar_type()) {
    case at::kDouble: return DType::kFloat64;
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    default: break;
  }
  throw Error(ErrorCode::kModel,
              "a parameter has a dtype that is not trained here",
              {.where = "libtorch.scan",
               .which = name,
               .expected = "float64, float32 or bfloat16",
               .got = c10::toString(tensor.scalar_type())});
}

ScannedModel scan_model(torch::nn::Module& model, const std::vector<ParamGroup>& groups) {
  ScannedModel scanned;
  scanned.units.push_back({.name = "root"});
  scanned.wrappers.push_back(nullptr);
  // Unit prefixes, so that the innermost unit around a name is its longest prefix.
  std::vector<std::pair<std::string, int>> prefixes;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    auto* wrapper = dynamic_cast<UnitBase*>(item.value().get());
    if (wrapper == nullptr) continue;
    const auto known_as = std::ranges::find(scanned.wrappers, wrapper);  // the same module under two names is one unit
    prefixes.emplace_back(item.key() + ".", static_cast<int>(known_as - scanned.wrappers.begin()));
    if (known_as != scanned.wrappers.end()) continue;
    scanned.units.push_back({.name = plain_name(item.key())});
    scanned.wrappers.push_back(wrapper);
  }
  const auto unit_of = [&](const std::string& name) {
    int unit = 0;
    std::size_t longest = 0;
    for (const auto& [prefix, index] : prefixes) {
      if (prefix.size() > longest && name.starts_with(prefix)) {
        longest = prefix.size();
        unit = index;
      }
    }
    return unit;
  };

  std::unordered_map<at::TensorImpl*, std::size_t> known;
  std::vector<int> unit_of_param;
  std::vector<std::string> path_of_param;  // a name, or what names in different units have in common
  for (const auto& item : model.named_parameters(/*recurse=*/true)) {
    const at::Tensor& tensor = item.value();
    const std::string name = plain_name(item.key());
    const int unit = unit_of(item.key());
    if (!tensor.defined()) continue;
    const auto [found, fresh] = known.try_emplace(tensor.unsafeGetTensorImpl(), scanned.params.size());
    if (!fresh) {
      ParamSpec& spec = scanned.params[found->second];
      if (name != spec.name && std::ranges::find(spec.aliases, name) == spec.aliases.end()) spec.aliases.push_back(name);
      if (unit_of_param[found->second] != unit) {
        // The lowest unit around all its uses.
        std::string& path = path_of_param[found->second];
        path = common_path(path, item.key());
        unit_of_param[found->second] = unit_of(path);
      }
      continue;
    }
    check_trainable_kind(tensor, name);
    scanned.params.push_back({.name = name,
                              .shape = shape_of(tensor),
                              .dtype = dtype_of(tensor, name),
                              .trainable = tensor.requires_grad(),
                              .group = group_of(groups, name, tensor)});
    scanned.tensors.push_back(tensor);
    unit_of_param.push_back(unit);
    path_of_param.push_back(item.key());
  }
  for (std::size_t param = 0; param < unit_of_param.size(); ++param) {
    scanned.units[static_cast<std::size_t>(unit_of_param[param])].params.push_back(static_cast<int>(param));
  }
  for (const auto& item : model.named_buffers(/*recurse=*/true)) {
    if (item.value().defined()) scanned.buffers.emplace_back(plain_name(item.key()), item.value());
  }
  mark_repeated(scanned);
  return scanned;
}

}  // namespace zeroth::libtorch
