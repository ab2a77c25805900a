#include "libtorch/guards.h"

#include <zeroth/libtorch/engine.h>

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/COWDeleter.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace zeroth::libtorch {
namespace {

/// Of guards only. Torch keeps it for wrappers of tensors in its own tests and has no kernels for it; it comes before
/// all keys of autograd, functorch and backends.
constexpr c10::DispatchKey kGuardKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

struct Refusal {
  Error error;
  Rethrow rethrow;
  [[noreturn]] void operator()() const {
    if (rethrow) rethrow(error);
    throw error;
  }
};

/// The storage of a guard.
class GuardStorage final : public c10::StorageImpl {
 public:
  GuardStorage(std::size_t bytes, c10::Device device, Refusal refusal, GuardedValue value);
  [[nodiscard]] const Refusal& refusal() const { return refusal_; }
  [[nodiscard]] const GuardedValue& value() const { return value_; }

 private:
  Refusal refusal_;
  GuardedValue value_;
  /// Is asked for memory when somebody wants to write to a storage that is copied on write.
  class RefusingAllocator final : public c10::Allocator {
   public:
    explicit RefusingAllocator(const Refusal& refusal) : refusal_(refusal) {}
    at::DataPtr allocate(std::size_t /*bytes*/) override {
      shared_pointer().increment_refcount();  // torch gave up the storage's reference before it asked for memory
      refusal_();
    }
    void copy_data(void* /*to*/, const void* /*from*/, std::size_t /*bytes*/) const override { refusal_(); }

    /// What makes a pointer one that is copied on write. All guards share it; one reference is never given back, so
    /// that a guard is never the last.
    static c10::impl::cow::COWDeleterContext& shared_pointer() {
      static auto* const context =
          new c10::impl::cow::COWDeleterContext(std::unique_ptr<void, c10::DeleterFnPtr>(nullptr, [](void*) {}));
      return *context;
    }

   private:
    const Refusal& refusal_;
  };
  RefusingAllocator allocator_{refusal_};
};

/// Makes torch call `refuse` before it gives out a pointer to write through; false where it has no such hook, which
/// came with 2.15.
template <class Storage>
bool set_materializer_of(Storage& storage, void (*refuse)(c10::StorageImpl*)) {
  if constexpr (requires { storage.set_materializer(refuse); }) {
    storage.set_materializer(refuse);
    return true;
  }
  return false;
}

GuardStorage::GuardStorage(std::size_t bytes, c10::Device device, Refusal refusal, GuardedValue value)
    : c10::StorageImpl(use_byte_size_t(), static_cast<std::int64_t>(bytes), at::DataPtr(nullptr, device), nullptr,
                       /*resizable=*/false),
      refusal_(std::move(refusal)),
      value_(std::move(value)) {
  if (set_materializer_of(static_cast<c10::StorageImpl&>(*this),
                          [](c10::StorageImpl* storage) { static_cast<GuardStorage*>(storage)->refusal_(); })) {
    return;
  }
  set_allocator(&allocator_);
  RefusingAllocator::shared_pointer().increment_refcount();
  set_data_ptr_noswap(at::DataPtr(nullptr, &RefusingAllocator::shared_pointer(), &c10::impl::cow::cow_deleter, device));
}

const GuardStorage* guard_behind(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kGuardKey)) return nullptr;
  return dynamic_cast<const GuardStorage*>(tensor.storage().unsafeGetStorageImpl());
}

/// Calls look(tensor) for the tensors in an argument of an operator.
template <class Look>
void for_tensors(const c10::IValue& value, const Look& look) {
  if (value.isTensor()) look(value.toTensor());
  if (value.isTensorList()) std::ranges::for_each(value.toTensorVector(), look);
  if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) look(tensor.value_or(at::Tensor()));
  }
}

/// Throws the refusal of the first guard whose values nobody has.
void bring_values(const std::vector<at::Tensor>& guards, const Storages& used) {
  struct Wanted {
    std::shared_ptr<ValueSource> source;
    const Refusal& refusal;
    std::vector<int> params;
  };
  std::vector<Wanted> wanted;
  std::vector<std::pair<std::size_t, int>> of_guard;  // index in `wanted`, parameter
  for (const at::Tensor& guard : guards) {
    const GuardStorage& storage = *guard_behind(guard);
    std::shared_ptr<ValueSource> source = storage.value().source.lock();
    if (!source) storage.refusal()();
    auto found = std::ranges::find(wanted, source, &Wanted::source);
    if (found == wanted.end()) {
      wanted.push_back({std::move(source), storage.refusal(), {}});
      found = wanted.end() - 1;
    }
    found->params.push_back(storage.value().param);
    of_guard.emplace_back(found - wanted.begin(), storage.value().param);
  }
  for (const Wanted& one : wanted) {
    bool brought = false;
    try {
      brought = one.source->bring(one.params, used);
    } catch (const Error& error) {
      if (one.refusal.rethrow) one.refusal.rethrow(error);
      throw;
    }
    if (!brought) one.refusal();
  }
  for (std::size_t index = 0; index < guards.size(); ++index) {
    if (guard_behind(guards[index]) == nullptr) continue;  // the parameter itself: it has its memory
    wanted[of_guard[index].first].source->attach(of_guard[index].second, guards[index]);
  }
}

/// Operators that need no values: those made of others, which are looked at one by one; views; and those that ask for
/// shapes.
bool needs_no_values(const c10::OperatorHandle& op) {
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return true;
  const std::vector<c10::Argument>& returns = op.schema().returns();
  const bool view = !returns.empty() && std::ranges::all_of(returns, [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
  if (view) return true;
  const std::string& full = op.operator_name().name;
  const std::string_view name = std::string_view(full).substr(full.find("::") + 2);
  constexpr std::array kOfShapes = {"is_same_size", "sym_size",           "sym_stride",
                                    "sym_numel",    "sym_storage_offset", "sym_is_contiguous"};
  return name.ends_with("_like") || name.starts_with("new_") || std::ranges::find(kOfShapes, name) != kOfShapes.end();
}

void look_at(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (!needs_no_values(op)) {
    const std::vector<c10::Argument>& arguments = op.schema().arguments();
    const std::size_t first = stack->size() - arguments.size();
    std::vector<at::Tensor> guards;
    Storages used;
    for (std::size_t index = 0; index < arguments.size(); ++index) {
      const std::size_t before = guards.size();
      for_tensors((*stack)[first + index], [&](const at::Tensor& tensor) {
        if (guard_behind(tensor) != nullptr) {
          guards.push_back(tensor);
        } else if (tensor.defined() && tensor.has_storage()) {
          used.push_back(tensor.storage().unsafeGetStorageImpl());
        }
      });
      const bool is_written = arguments[index].alias_info() != nullptr && arguments[index].alias_info()->isWrite();
      // What is gathered is a copy: a write to it would be lost.
      if (is_written && guards.size() > before) guard_behind(guards[before])->refusal()();
    }
    if (!guards.empty()) bring_values(guards, used);
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kGuardKey), stack);
}

void register_look() {
  static const c10::RegistrationHandleRAII handle = c10::Dispatcher::singleton().registerFallback(
      kGuardKey, c10::KernelFunction::makeFromBoxedFunction<&look_at>(), "zeroth guards");
}

/// [Note: Guards in archives] torch::save(), torch.jit.save() and torch's other archives read a storage's pointer
/// without a word to the tensor, and would write, or read, what is at null. Before that they ask a table of functions,
/// one a kind of device, for what a tensor keeps beside its values. Torch has such functions for backends out of its
/// tree alone: in the places of other devices there are none.
void refuse_archives(c10::DeviceType type) {
  static std::mutex mutex;
  static std::array<bool, at::COMPILE_TIME_MAX_DEVICE_TYPES> known{};
  const std::lock_guard lock(mutex);
  const auto index = static_cast<std::size_t>(type);
  if (std::exchange(known.at(index), true)) return;
  auto& functions = torch::jit::GetBackendMetaSerialization().at(index);
  using Metadata = std::unordered_map<std::string, bool>;
  const auto before = functions;
  functions = std::pair{torch::jit::BackendMetaPtr([before](const at::Tensor& tensor, Metadata& metadata) {
                          if (tensor.has_storage()) require_memory(tensor.storage());
                          if (before) before->first(tensor, metadata);
                        }),
                        torch::jit::BackendMetaPtr([before](const at::Tensor& tensor, Metadata& metadata) {
                          if (before) before->second(tensor, metadata);
                        })};
}

/// [Note: Storage without memory] A storage of torch's can be told to throw when its pointer is read, with a text, but
/// before 2.15 not to stop that: the flag has a way in and none out. A parameter's memory goes and comes again, so the
/// flag is cleared here, through what the language allows: names in explicit instantiations are not checked for access.
template <bool c10::StorageImpl::* kFlag>
struct AccessToFlag {
  friend void set_flag(c10::StorageImpl& storage, bool value) { storage.*kFlag = value; }
};
void set_flag(c10::StorageImpl& storage, bool value);
template struct AccessToFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

/// Torch looks at the flag when it is given a pointer.
void set_throws(c10::StorageImpl& storage, bool throws, const std::string& text) {
  std::optional<std::string>& kept = storage.get_extra_meta().custom_data_ptr_error_msg_;
  if (kept != text) kept = text;
  set_flag(storage, throws);
}

}  // namespace

at::Tensor make_guard(const at::Tensor& like, const Error& error, const Rethrow& rethrow, GuardedValue value) {
  register_look();
  refuse_archives(like.device().type());
  c10::Storage storage(
      c10::make_intrusive<GuardStorage>(like.nbytes(), like.device(), Refusal{error, rethrow}, std::move(value)));
  const c10::DispatchKey key = c10::computeDispatchKey(like.scalar_type(), at::kStrided, like.device());
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key).add(kGuardKey),
                                                         at::scalarTypeToTypeMeta(like.scalar_type()));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

void require_memory(const at::Storage& storage) {
  if (const auto* guard = dynamic_cast<const GuardStorage*>(storage.unsafeGetStorageImpl())) guard->refusal()();
}

std::string why_without_memory(const at::Tensor& tensor) {
  const GuardStorage* storage = guard_behind(tensor);
  return storage == nullptr ? "" : storage->refusal().error.message();
}

ParameterStorage::ParameterStorage(std::size_t bytes, c10::Device device, std::string text)
    : storage_(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                     static_cast<std::int64_t>(bytes), at::DataPtr(nullptr, device),
                                                     nullptr, /*resizable=*/false)),
      device_(device),
      text_(std::move(text)) {
  release();
}

void ParameterStorage::bind(at::DataPtr data) {
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  released_ = false;
  set_throws(storage, false, text_);
  storage.set_data_ptr_noswap(std::move(data));
}

void ParameterStorage::release() {
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  released_ = true;
  set_throws(storage, true, text_);
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, device_));
}

void ParameterStorage::set_text(std::string text) {
  text_ = std::move(text);
  if (released_) release();
}

void ParameterStorage::retire(std::string text) {
  text_ = std::move(text);
  release();
}

}  // namespace zeroth::libtorch
