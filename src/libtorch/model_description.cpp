#include "libtorch/model_scan.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/libtorch/model_description.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <unordered_map>

namespace zeroth::libtorch {
namespace {

/// Left behind by an engine that is gone.
bool has_lost_memory(const at::Tensor& tensor) {
  return tensor.nbytes() > 0 && tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() == nullptr;
}

void check_trainable_kind(const at::Tensor& tensor, const std::string& name) {
  const auto refuse = [&name](const std::string& got, const std::string& hint) {
    throw Error(ErrorCode::kModel, "a parameter cannot be partitioned",
                {.where = "libtorch.scan",
                 .which = name,
                 .expected = "a dense tensor on the CPU or a CUDA device",
                 .got = got,
                 .hint = hint});
  };
  if (tensor.is_meta())
    refuse("a meta tensor (shape without memory)",
           "in Python zeroth.deferred(build) builds a module whose weights the engine makes; else materialise it "
           "before the engine is built");
  if (tensor.layout() != at::kStrided) {
    refuse(std::string("layout ") + (tensor.layout() == at::kSparse ? "sparse" : "not strided"),
           "use to_dense(), or sparse=false in the embedding");
  }
  if (has_lost_memory(tensor)) {
    refuse("a tensor without memory",
           "the engine that held its values is gone: give them back next time, by release_parameters(), in Python "
           "close(), and build the model anew");
  }
  if (!tensor.is_cpu() && !tensor.is_cuda())
    refuse("device " + tensor.device().str(), "move the model to the CPU or a CUDA device");
  if (!tensor.is_non_overlapping_and_dense()) {
    std::string strides;
    for (const std::int64_t stride : tensor.strides())
      strides += (strides.empty() ? "" : ", ") + std::to_string(stride);
    refuse("strides [" + strides + "] with gaps or overlap", "make it contiguous() before it becomes a parameter");
  }
}

/// A complex parameter that trains is a tensor of pairs of reals, as torch's optimizers see it.
std::vector<std::int64_t> shape_of(const at::Tensor& tensor, bool trainable) {
  std::vector<std::int64_t> shape = tensor.sizes().vec();
  if (trainable && tensor.is_complex()) shape.push_back(2);
  return shape;
}

/// ParamSpec::memory_order of a dense tensor.
std::vector<int> memory_order_of(const at::Tensor& tensor, std::size_t dims) {
  if (tensor.is_contiguous()) return {};
  std::vector<int> order(dims);  // of a complex parameter with the pairs of reals, which are innermost
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.begin() + tensor.dim(),
                   [&tensor](int one, int other) { return tensor.stride(one) > tensor.stride(other); });
  return order;
}

bool nested(const std::string& one, const std::string& other) {
  return one.starts_with(other + ".") || other.starts_with(one + ".");
}

/// Units that look alike, by class and parameters, share the ring of slots: blocks of an encoder, and of a decoder. Not
/// such as are gathered while others there are, because one lies in the other: of those the kind that is there most
/// often. And not such as several layers of a pipeline use, tied weights and boxes of a tensor that has several: their
/// gradients come in several backwards of a micro-step, between those of other units.
void mark_repeated(ModelDescription& model, const std::vector<std::string>& types) {
  std::map<std::string, std::vector<std::size_t>> classes;
  for (std::size_t unit = 1; unit < model.units.size(); ++unit) {
    std::string look = types[unit];
    bool in_several = false;
    for (const int param : model.units[unit].params) {
      const ParamSpec& spec = model.params[static_cast<std::size_t>(param)];
      const bool staged = !model.axes[static_cast<std::size_t>(param)].stages.empty();
      in_several = in_several || !spec.whole.empty() || (staged && !spec.aliases.empty());
      look += "|" + std::string(name_of(spec.dtype));
      const std::vector<std::int64_t>& shape = spec.logical_shape.empty() ? spec.shape : spec.logical_shape;
      for (const std::int64_t extent : shape) look += "," + std::to_string(extent);
    }
    if (!in_several) classes[look].push_back(unit);
  }
  std::vector<std::vector<std::size_t>> kinds;
  for (auto& [look, members] : classes) kinds.push_back(std::move(members));
  std::ranges::stable_sort(kinds, std::greater(), [](const auto& members) { return members.size(); });
  std::vector<std::size_t> ring;
  for (const std::vector<std::size_t>& members : kinds) {
    const bool apart = std::ranges::none_of(members, [&](std::size_t unit) {
      return std::ranges::any_of(
          ring, [&](std::size_t other) { return nested(model.units[unit].name, model.units[other].name); });
    });
    if (members.size() >= 2 && apart) ring.insert(ring.end(), members.begin(), members.end());
  }
  for (const std::size_t unit : ring) model.units[unit].repeated = true;
}

/// Two parameters over one memory are one to whoever trains them in place, and two here.
void require_own_memory(const ModelDescription& model) {
  struct Extent {
    std::uintptr_t begin;
    std::uintptr_t end;
    std::size_t param;
  };
  std::vector<Extent> extents;
  for (std::size_t param = 0; param < model.tensors.size(); ++param) {
    const at::Tensor& tensor = model.tensors[param];
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.nbytes() > 0 ? tensor.const_data_ptr() : nullptr);
    if (begin != 0) extents.push_back({begin, begin + tensor.nbytes(), param});  // dense, without gaps
  }
  std::ranges::sort(extents, {}, &Extent::begin);
  for (std::size_t index = 1; index < extents.size(); ++index) {
    const auto [one, other] = std::minmax(extents[index - 1].param, extents[index].param);
    const bool written = model.params[one].trainable || model.params[other].trainable;
    ZR_CHECK(!written || extents[index - 1].end <= extents[index].begin, ErrorCode::kModel,
             "two parameters share memory, but are not the same parameter",
             {.where = "libtorch.scan",
              .which = model.params[one].name + " and " + model.params[other].name,
              .expected = "one nn.Parameter under both names, or memory of its own for each",
              .hint = "tie weights by assigning the parameter itself: b.weight = a.weight"});
  }
}

/// The longest common prefix that ends with a dot, or "".
std::string common_path(const std::string& one, const std::string& other) {
  const auto differ = std::ranges::mismatch(one, other);
  const std::string shared(one.begin(), differ.in1);
  return shared.substr(0, shared.rfind('.') + 1);
}

}  // namespace

std::optional<DType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return DType::kFloat64;
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    case at::kLong:
      return DType::kInt64;
    case at::kInt:
      return DType::kInt32;
    case at::kByte:
      return DType::kUInt8;
    default:
      return std::nullopt;
  }
}

DType dtype_of(const at::Tensor& tensor, const std::string& name) {
  if (tensor.scalar_type() == at::kComplexFloat) return DType::kFloat32;
  if (tensor.scalar_type() == at::kComplexDouble) return DType::kFloat64;
  const std::optional<DType> dtype = dtype_of(tensor.scalar_type());
  if (dtype && is_trained(*dtype)) return *dtype;
  throw Error(ErrorCode::kModel, "a parameter has a dtype that is not trained here",
              {.where = "libtorch.scan",
               .which = name,
               .expected = "float64, float32, bfloat16, float16, or complex numbers of the first two",
               .got = c10::toString(tensor.scalar_type()),
               .hint = "convert the model, say with model.to(torch.bfloat16), or freeze the parameter and leave it out "
                       "of the parameter groups"});
}

namespace {

/// A parameter that never trains is kept and gathered as bytes, so only the size of its elements counts.
DType frozen_dtype_of(const at::Tensor& tensor, const std::string& name) {
  if (const std::optional<DType> dtype = dtype_of(tensor.scalar_type()); dtype && is_trained(*dtype)) return *dtype;
  if (!tensor.is_quantized()) {
    switch (tensor.element_size()) {
      case 1:
        return DType::kUInt8;
      case 2:
        return DType::kFloat16;
      case 4:
        return DType::kInt32;
      case 8:
        return DType::kInt64;
      default:
        break;
    }
  }
  throw Error(ErrorCode::kModel, "a frozen parameter has a dtype that cannot be partitioned",
              {.where = "libtorch.scan",
               .which = name,
               .expected = "elements of 1, 2, 4 or 8 bytes",
               .got = c10::toString(tensor.scalar_type()),
               .hint = "keep it in a buffer"});
}

void put_box(ParamSpec& spec, const ParameterBox& box, const at::Tensor& tensor) {
  if (box.logical_shape.empty()) return;
  ZR_CHECK(tensor.is_contiguous() && tensor.dim() == static_cast<std::int64_t>(spec.shape.size()), ErrorCode::kModel,
           "ranks cannot share a parameter of this kind",
           {.where = "libtorch.scan",
            .which = spec.name,
            .expected = "a contiguous tensor of real numbers",
            .got = tensor.toString() + " " + c10::str(tensor.sizes())});
  spec.logical_shape = box.logical_shape;
  spec.box_offset = box.offset;
  spec.box_parts = box.parts;
  spec.box_parts_dim = box.parts_dim;
}

/// Names become keys of safetensors files.
void require_names_for_files(const ModelDescription& model) {
  const auto check = [](const std::string& name) {
    ZR_CHECK(unwrapped_name(name) != "__metadata__", ErrorCode::kModel,
             "a parameter or buffer has a name that safetensors files keep for themselves",
             {.where = "libtorch.scan", .which = name, .hint = "give it another name: it could not be exported"});
  };
  for (const ParamSpec& spec : model.params) {
    check(spec.tensor_name());
    std::ranges::for_each(spec.aliases, check);
  }
  for (const NamedBuffer& buffer : model.buffers) {
    if (buffer.persistent) check(buffer.name);
  }
}

}  // namespace

ModelDescription describe_model(const std::vector<UnitPath>& units, const std::vector<NamedParameter>& parameters,
                                std::vector<NamedBuffer> buffers, const GroupOf& group_of) {
  ModelDescription model;
  model.units.push_back({.name = "root"});
  std::vector<const void*> identities{nullptr};
  std::vector<std::string> types{""};
  // Paths, so that the innermost unit around a name is the one with the longest.
  std::vector<std::pair<std::string, int>> prefixes;
  for (const UnitPath& unit : units) {
    const auto known_as = std::find(identities.begin() + 1, identities.end(), unit.identity);
    prefixes.emplace_back(unit.path + ".", static_cast<int>(known_as - identities.begin()));
    if (known_as != identities.end()) continue;
    model.units.push_back({.name = unit.path, .uses = unit.uses});
    identities.push_back(unit.identity);
    types.push_back(unit.type);
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
  for (const auto& [name, tensor, may_train, box] : parameters) {
    if (!tensor.defined()) continue;
    const int unit = unit_of(name);
    const auto [found, fresh] = known.try_emplace(tensor.unsafeGetTensorImpl(), model.params.size());
    if (!fresh) {
      ParamSpec& spec = model.params[found->second];
      if (spec.whole.empty() && name != spec.name && std::ranges::find(spec.aliases, name) == spec.aliases.end())
        spec.aliases.push_back(name);
      if (unit_of_param[found->second] != unit) {
        // The lowest unit around all its uses.
        std::string& path = path_of_param[found->second];
        path = common_path(path, name);
        unit_of_param[found->second] = unit_of(path);
      }
      continue;
    }
    check_trainable_kind(tensor, name);
    ZR_CHECK(model.tensors.empty() || tensor.device() == model.tensors[0].device(), ErrorCode::kModel,
             "parameters are on different devices",
             {.where = "libtorch.scan",
              .which = name,
              .expected = model.tensors.empty() ? "" : model.tensors[0].device().str() + ", as " + model.params[0].name,
              .got = tensor.device().str(),
              .hint = "move the whole model to one device before the engine is built: one GPU a rank"});
    // Integers cannot want a gradient, whatever group they are in.
    const bool trainable = tensor.requires_grad() || (may_train && (tensor.is_floating_point() || tensor.is_complex()));
    model.params.push_back({.name = name,
                            .shape = shape_of(tensor, trainable),
                            .dtype = trainable ? dtype_of(tensor, name) : frozen_dtype_of(tensor, name),
                            .trainable = trainable,
                            .group = group_of(name, tensor)});
    model.params.back().memory_order = memory_order_of(tensor, model.params.back().shape.size());
    put_box(model.params.back(), box, tensor);
    if (!box.names.empty()) {
      model.params.back().whole = box.names.front();
      model.params.back().aliases.assign(box.names.begin() + 1, box.names.end());
    }
    model.tensors.push_back(tensor);
    model.axes.push_back(box.axes);
    unit_of_param.push_back(unit);
    path_of_param.push_back(name);
  }
  for (std::size_t param = 0; param < unit_of_param.size(); ++param) {
    model.units[static_cast<std::size_t>(unit_of_param[param])].params.push_back(static_cast<int>(param));
  }
  require_own_memory(model);
  model.buffers = std::move(buffers);
  require_names_for_files(model);
  mark_repeated(model, types);
  return model;
}

}  // namespace zeroth::libtorch
