#include "libtorch/slots.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace zeroth::libtorch {
namespace {

at::Tensor tensor_on(c10::Storage storage, const at::Tensor& like) {
  const c10::DispatchKey key = c10::computeDispatchKey(like.scalar_type(), at::kStrided, storage.device());
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                         at::scalarTypeToTypeMeta(like.scalar_type()));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

std::int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

/// An address in `whole`, which it keeps.
at::DataPtr part_of(const std::shared_ptr<at::DataPtr>& whole, std::size_t offset) {
  using Owner = std::shared_ptr<at::DataPtr>;
  auto* const address = static_cast<std::byte*>(whole->get()) + offset;
  return {address, new Owner(whole), [](void* owner) { delete static_cast<Owner*>(owner); }, whole->device()};
}

}  // namespace

ParameterSlots::ParameterSlots(std::vector<at::Tensor> tensors, std::vector<ParamSpec> specs)
    : tensors_(std::move(tensors)),
      specs_(std::move(specs)),
      device_(tensors_.empty() ? at::kCPU : tensors_[0].device()) {}

void ParameterSlots::set_layout(const ModelLayout& layout, bool gathered, std::unique_ptr<DeviceCopies> copies) {
  layout_ = &layout;
  gathered_ = gathered;
  copies_ = std::move(copies);
  bound_.assign(layout.flats.size(), nullptr);
  changing_.assign(layout.flats.size(), false);
  forgiven_.assign(layout.flats.size(), false);
  for (std::size_t param = 0; param < tensors_.size(); ++param) {
    const Error error = not_gathered(static_cast<int>(param));
    memory_.emplace_back(tensors_[param].nbytes(), device_, error.what());
    views_.push_back(tensor_on(memory_[param].storage(), tensors_[param]));
    guards_.push_back(
        make_guard(tensors_[param], error, rethrow_, {.source = source_, .param = static_cast<int>(param)}));
  }
}

Error ParameterSlots::not_gathered(int param) const {
  const std::string& name = specs_[static_cast<std::size_t>(param)].name;
  const int unit = layout_->places[static_cast<std::size_t>(param)].unit;
  return {ErrorCode::kUsage,
          "parameter '" + name + "' is not gathered now, so it has no memory",
          {.where = "libtorch.parameters",
           .which = name,
           .expected = "use in a call of its unit (" + layout_->units[static_cast<std::size_t>(unit)].name +
                       "), for whose forward and backward it is gathered",
           .hint = std::string(words_->gather) + " gathers it for other code, and gradients flow; " + words_->units +
                   "; export_safetensors() and " + words_->give_back + " give values back"}};
}

at::Tensor ParameterSlots::guard_like(int param, const Error& error) const {
  return make_guard(tensor(param), error, rethrow_);
}

void ParameterSlots::attach(int param, const at::Tensor& alias) const {
  const c10::InferenceMode as_alias(alias.is_inference());
  const c10::Storage& storage = memory_[static_cast<std::size_t>(param)].storage();
  const at::Tensor bound = tensor_on(storage, alias);
  bound.unsafeGetTensorImpl()->set_storage_offset(alias.storage_offset());
  bound._set_conj(alias.is_conj());
  bound._set_neg(alias.is_neg());
  alias.unsafeGetTensorImpl()->shallow_copy_from(bound.getIntrusivePtr());
}

bool ParameterSlots::has_aliases(int unit) const {
  constexpr std::size_t kOwn = 3;  // the storage itself, the view of all of it, the parameter
  return std::ranges::any_of(layout_->units[static_cast<std::size_t>(unit)].params, [this](int param) {
    return memory_[static_cast<std::size_t>(param)].storage().use_count() > kOwn;
  });
}

bool ParameterSlots::has_any(int unit, const Storages& storages) const {
  return std::ranges::any_of(layout_->units[static_cast<std::size_t>(unit)].params, [&](int param) {
    const c10::StorageImpl* own = memory_[static_cast<std::size_t>(param)].storage().unsafeGetStorageImpl();
    return std::ranges::find(storages, own) != storages.end();
  });
}

bool ParameterSlots::is_bound(int unit) const {
  return std::ranges::all_of(layout_->unit_flats[static_cast<std::size_t>(unit)],
                             [this](int flat) { return bound_[static_cast<std::size_t>(flat)] != nullptr; });
}

std::vector<int> ParameterSlots::bound_units() const {
  std::vector<int> units;
  for (int unit = 0; unit < static_cast<int>(layout_->units.size()); ++unit) {
    if (!layout_->unit_flats[static_cast<std::size_t>(unit)].empty() && is_bound(unit)) units.push_back(unit);
  }
  return units;
}

void ParameterSlots::explain(int unit, const std::string& text) {
  for (const int param : layout_->units[static_cast<std::size_t>(unit)].params) {
    memory_[static_cast<std::size_t>(param)].set_text(text.empty() ? not_gathered(param).what() : text);
  }
}

ConstTensorView ParameterSlots::initial_value(int param) {
  const at::Tensor& tensor = tensors_[static_cast<std::size_t>(param)];
  const ParamSpec& spec = specs_[static_cast<std::size_t>(param)];
  if (spec.numel() == 0) return {nullptr, spec.shape, spec.dtype};
  if (at::Tensor made = make_initial_ ? make_initial_(spec.name) : at::Tensor(); made.defined()) {
    // The parameter may have been cast for the configuration (zeroth.cast).
    if (made.scalar_type() == at::kFloat && tensor.element_size() == 2) made = made.to(tensor.scalar_type());
    ZR_CHECK(made.is_cpu() && made.scalar_type() == tensor.scalar_type() && made.sizes() == tensor.sizes() &&
                 made.strides() == tensor.strides(),
             ErrorCode::kModel, "the initial values that were made late do not fit their parameter",
             {.where = "libtorch.initial",
              .which = spec.name,
              .expected = tensor.toString() + " " + c10::str(tensor.sizes()),
              .got = made.toString() + " " + c10::str(made.sizes())});
    initial_bytes_ += made.nbytes();
    initial_peak_ = std::max<std::uint64_t>(initial_peak_, initial_bytes_);
    initial_.push_back(std::move(made));
    return {static_cast<const std::byte*>(initial_.back().const_data_ptr()), spec.shape, spec.dtype};
  }
  if (device_.is_cpu()) return {static_cast<const std::byte*>(tensor.const_data_ptr()), spec.shape, spec.dtype};
  const at::NoGradGuard no_grad;
  initial_.push_back(tensor.to(at::kCPU));  // strides stay: the parameter is dense
  return {static_cast<const std::byte*>(initial_.back().const_data_ptr()), spec.shape, spec.dtype};
}

void ParameterSlots::drop_initial(std::span<const int> params) {
  const at::NoGradGuard no_grad;
  taken_ = true;
  for (const int param : params) {
    tensors_[static_cast<std::size_t>(param)].set_data(guards_[static_cast<std::size_t>(param)]);
  }
  initial_.clear();
  initial_bytes_ = 0;
}

void ParameterSlots::bind(int flat, std::byte* data) {
  if (given_back_) return;
  const at::NoGradGuard no_grad;
  const FlatLayout& layout = layout_->flat(flat);
  if (data != nullptr) forgiven_[static_cast<std::size_t>(flat)] = false;
  // On another device every parameter holds the copy of its flat.
  const auto copy = data != nullptr && copies_ ? std::make_shared<at::DataPtr>(copies_->fetch(flat, data)) : nullptr;
  for (const Segment& segment : layout.segments) {
    const auto param = static_cast<std::size_t>(segment.param);
    if (data == nullptr) {
      tensors_[param].set_data(guards_[param]);  // first: torch's profiler looks at pointers of what changes
      memory_[param].release();
      continue;
    }
    const std::size_t offset = static_cast<std::size_t>(segment.offset) * size_of(layout.dtype);
    memory_[param].bind(copy ? part_of(copy, offset) : at::DataPtr(data + offset, device_));
    tensors_[param].set_data(views_[param]);
  }
  if (data == nullptr && copies_ && bound_[static_cast<std::size_t>(flat)] != nullptr) copies_->release(flat);
  bound_[static_cast<std::size_t>(flat)] = data;
}

void ParameterSlots::refresh(Renewed renewed) {
  if (!copies_ || given_back_) return;
  const at::NoGradGuard no_grad;
  for (std::size_t flat = 0; flat < bound_.size(); ++flat) {
    if (bound_[flat] == nullptr || (renewed == Renewed::kTrainable && !layout_->flats[flat].trainable)) continue;
    copies_->refresh(static_cast<int>(flat), bound_[flat]);
    changing_[flat] = false;
  }
}

void ParameterSlots::take_writes() {
  if (!copies_ || gathered_ || given_back_) return;
  const at::NoGradGuard no_grad;
  std::vector<int> flats;
  for (std::size_t flat = 0; flat < bound_.size(); ++flat) {
    if (bound_[flat] != nullptr) flats.push_back(static_cast<int>(flat));
  }
  for (const int flat : copies_->written(flats)) {
    if (changing_[static_cast<std::size_t>(flat)]) {
      lose_write(flat, -1);
    } else {
      copies_->take(flat, bound_[static_cast<std::size_t>(flat)]);
    }
  }
}

void ParameterSlots::lose_write(int flat, std::int64_t element) noexcept {
  if (forgiven_[static_cast<std::size_t>(flat)] || !lost_.empty()) return;
  try {
    lost_ = names_at(flat, element);
  } catch (...) {
    lost_ = "?";
  }
}

std::string ParameterSlots::names_at(int flat, std::int64_t element) const {
  std::vector<std::string> names;
  for (const Segment& segment : layout_->flat(flat).segments) {
    const std::string& name = specs_[static_cast<std::size_t>(segment.param)].name;
    if (element >= segment.offset && element < segment.offset + segment.numel) return name;
    names.push_back(name);
  }
  constexpr std::size_t kMost = 3;
  const bool many = names.size() > kMost;
  if (many) names.resize(kMost);
  return "one of " + join(names, ", ") + (many ? ", ..." : "");
}

void ParameterSlots::throw_lost(const std::string& name) const {
  throw Error(ErrorCode::kModel, "a parameter was written in place, where its value is only a copy",
              {.where = "libtorch.parameters",
               .which = name,
               .expected = "values that only the engine changes",
               .got = gathered_ ? "a write to what was gathered from the shards"
                                : std::string("a write to a copy while its update ran"),
               .hint = gathered_ ? "write inside " + std::string(words_->edit) +
                                       ", or at a zero_optimization stage below 3, where every rank has all of it"
                                 : "write between step() and the next forward"});
}

void ParameterSlots::require_not_lost(std::size_t param) const {
  if (gathered_ && version_of(tensors_[param]) != versions_[param]) throw_lost(specs_[param].name);
}

void ParameterSlots::require_nothing_lost() {
  if (!lost_.empty()) throw_lost(std::exchange(lost_, ""));
}

void ParameterSlots::require_kept() {
  if (copies_) {
    for (const int flat : copies_->take_lost()) lose_write(flat, -1);
  }
  for (std::size_t param = 0; param < tensors_.size(); ++param) require_not_lost(param);
  require_nothing_lost();
}

void ParameterSlots::require_unwritten(int unit) const {
  for (const int param : layout_->units[static_cast<std::size_t>(unit)].params) {
    const auto index = static_cast<std::size_t>(param);
    ZR_CHECK(
        version_of(tensors_[index]) == versions_[index], ErrorCode::kModel,
        "a parameter was written in place during a forward",
        {.where = "libtorch.forward",
         .which = specs_[index].name,
         .expected = "a forward that only reads parameters: ranks see different data, and sharded ones would lose it",
         .got = "a write, as by Embedding(max_norm=...)",
         .hint = "normalise a copy in the forward, or keep the value in a buffer"});
  }
}

void ParameterSlots::forget_writes(int unit) {
  if (!gathered_) return;
  own_versions(layout_->units[static_cast<std::size_t>(unit)].params);
  for (const int flat : layout_->unit_flats[static_cast<std::size_t>(unit)])
    forgiven_[static_cast<std::size_t>(flat)] = true;
  lost_.clear();
}

void ParameterSlots::own_versions(const std::vector<int>& params) {
  for (const int param : params)
    versions_[static_cast<std::size_t>(param)] = version_of(tensors_[static_cast<std::size_t>(param)]);
}

void ParameterSlots::take_versions() {
  versions_.clear();
  for (const at::Tensor& tensor : tensors_) versions_.push_back(version_of(tensor));
  written_.assign(tensors_.size(), false);
}

void ParameterSlots::look(std::size_t param) {
  const std::int64_t now = version_of(tensors_[param]);
  if (std::exchange(versions_[param], now) != now && !gathered_) written_[param] = true;
}

std::vector<std::pair<int, std::int64_t>> ParameterSlots::digests(Digests which) {
  std::vector<std::pair<int, std::int64_t>> all;
  if (gathered_ || given_back_) return all;
  for (std::size_t param = 0; param < tensors_.size(); ++param) look(param);
  for (std::size_t flat = 0; flat < bound_.size(); ++flat) {
    if (bound_[flat] == nullptr) continue;
    const FlatLayout& layout = layout_->flats[flat];
    for (const Segment& segment : layout.segments) {
      if (which == Digests::kWritten && !written_[static_cast<std::size_t>(segment.param)]) continue;
      const auto size = static_cast<std::size_t>(size_of(layout.dtype));
      const auto* data = reinterpret_cast<const char*>(bound_[flat]) + static_cast<std::size_t>(segment.offset) * size;
      const std::uint64_t digest = digest64({data, static_cast<std::size_t>(segment.numel) * size});
      all.emplace_back(segment.param, static_cast<std::int64_t>(digest >> 1U | 1U));
    }
  }
  return all;
}

void ParameterSlots::agree(const std::vector<int>& params) {
  for (const int param : params) written_[static_cast<std::size_t>(param)] = false;
}

void ParameterSlots::agree() {
  written_.assign(written_.size(), false);
}

void ParameterSlots::require_bound(int unit) {
  require_ours(unit);
  require_nothing_lost();
  for (const int param : layout_->units[static_cast<std::size_t>(unit)].params) {
    const auto index = static_cast<std::size_t>(param);
    require_not_lost(index);
    look(index);
  }
}

void ParameterSlots::require_ours(int unit) const {
  for (const int param : layout_->units[static_cast<std::size_t>(unit)].params) {
    const auto index = static_cast<std::size_t>(param);
    const at::Tensor& tensor = tensors_[index];
    const c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    const bool ours = storage == memory_[index].storage().unsafeGetStorageImpl() ||
                      storage == guards_[index].unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    ZR_CHECK(ours && tensor.scalar_type() == views_[index].scalar_type() && tensor.sizes() == views_[index].sizes(),
             ErrorCode::kModel, "a parameter was moved, cast or given other data after the engine was built",
             {.where = "libtorch.parameters",
              .which = specs_[index].name,
              .expected = views_[index].toString() + " in the engine's memory",
              .got = tensor.toString() + " elsewhere",
              .hint = "move and cast the module before the engine is built, or after " +
                      std::string(words_->give_back) + " of the engine"});
  }
}

void ParameterSlots::give_back(const std::vector<at::Tensor>& own) {
  const at::NoGradGuard no_grad;
  for (std::size_t param = 0; param < tensors_.size(); ++param) tensors_[param].set_data(own[param]);
  given_back_ = true;
}

void ParameterSlots::retire() {
  const at::NoGradGuard no_grad;
  if (!taken_) return;
  for (std::size_t param = 0; param < memory_.size(); ++param) {
    const std::string& name = specs_[param].name;
    const Error error(ErrorCode::kUsage, "parameter '" + name + "' has no values any more",
                      {.where = "libtorch.parameters",
                       .which = name,
                       .got = words_->dropped,
                       .hint = std::string(words_->give_back) + " gives values back"});
    if (!given_back_) tensors_[param].set_data(guard_like(static_cast<int>(param), error));
    memory_[param].retire(Error(ErrorCode::kUsage,
                                "the engine that held parameter '" + name + "' is gone, so this view has no memory",
                                {.where = "libtorch.parameters", .which = name})
                              .what());
  }
}

void ParameterSlots::begin_update(int flat) {
  if (gathered_) return;  // what a backward reads is a copy
  if (copies_) {
    const at::NoGradGuard no_grad;
    if (!copies_->written({flat}).empty()) copies_->take(flat, bound_[static_cast<std::size_t>(flat)]);
    changing_[static_cast<std::size_t>(flat)] = true;
    return;  // likewise
  }
  std::vector<int> params;
  for (const Segment& segment : layout_->flat(flat).segments) params.push_back(segment.param);
  bump_versions(params);  // a node that still needs them is refused by autograd
}

void ParameterSlots::bump_versions(const std::vector<int>& params) {
  for (const int param : params) {
    look(static_cast<std::size_t>(param));
    torch::autograd::impl::bump_version(tensors_[static_cast<std::size_t>(param)]);
  }
  own_versions(params);
}

}  // namespace zeroth::libtorch
