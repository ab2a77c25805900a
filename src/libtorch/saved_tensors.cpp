#include <zeroth/base/error.h>
#include <zeroth/libtorch/saved_tensors.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace zeroth::libtorch {
namespace {

constexpr std::size_t kTensorAlignment = 64;  // of torch's allocator: kernels may sum in another order elsewhere
constexpr std::size_t kLookAgain = 256;       // packs between two looks for storages that are gone

/// Bytes of a storage.
struct ByteRange {
  std::size_t begin = 0;
  std::size_t end = 0;
  [[nodiscard]] std::size_t bytes() const { return end - begin; }
  [[nodiscard]] bool has(const ByteRange& other) const { return begin <= other.begin && other.end <= end; }
};

std::string text_of(const at::Tensor& tensor) {
  return c10::str(tensor.sizes(), " ", tensor.scalar_type());
}

/// Bytes of a storage that rest elsewhere, and the storage that has them again while anybody uses it.
class MovedBytes {
 public:
  MovedBytes(std::shared_ptr<ActivationStore> store, const at::Tensor& tensor, ByteRange range, const std::string& name)
      : store_(std::move(store)),
        range_(range),
        version_(tensor.unsafeGetTensorImpl()->version_counter().current_version()),
        data_(tensor.storage().data()),
        device_(tensor.device()),
        shift_(tensor.is_cpu() ? (reinterpret_cast<std::uintptr_t>(data_) + range.begin) % kTensorAlignment : 0) {
    if (tensor.is_cpu()) {
      id_ = store_->put({static_cast<const std::byte*>(data_) + range.begin, range.bytes()}, name);
      return;
    }
    const at::Tensor bytes = at::empty({0}, tensor.options().dtype(at::kByte).requires_grad(false))
                                 .set_(tensor.storage(), static_cast<std::int64_t>(range.begin),
                                       {static_cast<std::int64_t>(range.bytes())}, {1});
    host_ = at::empty(bytes.sizes(), bytes.options().device(at::kCPU).pinned_memory(store_ == nullptr));
    host_.copy_(bytes, /*non_blocking=*/store_ == nullptr);
    if (store_ == nullptr) return;
    id_ = store_->put({static_cast<const std::byte*>(host_.data_ptr()), range.bytes()}, name);
    host_.reset();
  }
  MovedBytes(const MovedBytes&) = delete;
  MovedBytes& operator=(const MovedBytes&) = delete;
  ~MovedBytes() {
    if (store_ != nullptr) store_->drop(id_);
  }

  [[nodiscard]] bool serves(const at::Tensor& tensor, const ByteRange& range) const {
    return range_.has(range) && tensor.storage().data() == data_ &&
           tensor.unsafeGetTensorImpl()->version_counter().current_version() == version_;
  }
  /// Of the range's first byte in what restore() gives.
  [[nodiscard]] std::size_t position(std::size_t of_storage) const { return of_storage - range_.begin + shift_; }

  [[nodiscard]] c10::Storage restore() {
    const std::scoped_lock lock(mutex_);
    if (c10::intrusive_ptr<c10::StorageImpl> there = restored_.lock()) return c10::Storage(std::move(there));
    at::Tensor bytes = at::empty({static_cast<std::int64_t>(shift_ + range_.bytes())}, at::kByte);
    if (store_ != nullptr) store_->get(id_, {static_cast<std::byte*>(bytes.data_ptr()) + shift_, range_.bytes()});
    if (!device_.is_cpu()) bytes = (host_.defined() ? host_ : bytes).to(device_, /*non_blocking=*/host_.defined());
    const c10::Storage& storage = bytes.storage();
    restored_ = c10::weak_intrusive_ptr<c10::StorageImpl>(storage.getWeakStorageImpl());
    return storage;
  }

 private:
  std::shared_ptr<ActivationStore> store_;
  ByteRange range_;
  std::uint32_t version_;
  const void* data_;
  c10::Device device_;
  std::size_t shift_;
  ActivationStore::Id id_ = 0;
  at::Tensor host_;
  std::mutex mutex_;
  c10::weak_intrusive_ptr<c10::StorageImpl> restored_{c10::intrusive_ptr<c10::StorageImpl>()};
};

/// Refuses a tensor that has another version than when it was saved.
class SavedVersion {
 public:
  explicit SavedVersion(const at::Tensor& tensor)
      : counter_(tensor.unsafeGetTensorImpl()->version_counter()),
        saved_(counter_.enabled() ? counter_.current_version() : 0),
        text_(text_of(tensor)) {}
  void require_same() const {
    const std::uint32_t now = counter_.enabled() ? counter_.current_version() : 0;
    ZR_CHECK(now == saved_, ErrorCode::kUsage,
             "one of the variables needed for gradient computation has been modified by an inplace operation",
             {.where = "libtorch.saved_tensors",
              .which = text_,
              .expected = "version " + std::to_string(saved_),
              .got = "version " + std::to_string(now),
              .hint = "torch.autograd.set_detect_anomaly(True) shows which forward saved it"});
  }

 private:
  c10::VariableVersion counter_;
  std::uint32_t saved_;
  std::string text_;
};

class Kept final : public SavedTensor {
 public:
  explicit Kept(const at::Tensor& tensor) : version_(tensor), tensor_(tensor.detach()) {}
  [[nodiscard]] at::Tensor unpack() const override {
    version_.require_same();
    return tensor_;
  }
  [[nodiscard]] bool moved() const override { return false; }

 private:
  SavedVersion version_;
  at::Tensor tensor_;
};

class Moved final : public SavedTensor {
 public:
  Moved(const at::Tensor& tensor, std::shared_ptr<MovedBytes> bytes)
      : version_(tensor),
        bytes_(std::move(bytes)),
        sizes_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        options_(tensor.options().requires_grad(false)),
        conjugate_(tensor.is_conj()),
        negative_(tensor.is_neg()),
        position_(bytes_->position(static_cast<std::size_t>(tensor.storage_offset()) * tensor.element_size())) {}
  [[nodiscard]] at::Tensor unpack() const override {
    version_.require_same();
    at::Tensor tensor = at::empty({0}, options_);
    tensor.set_(bytes_->restore(), static_cast<std::int64_t>(position_ / tensor.element_size()), sizes_, strides_);
    if (conjugate_) tensor._set_conj(true);
    if (negative_) tensor._set_neg(true);
    return tensor;
  }
  [[nodiscard]] bool moved() const override { return true; }

 private:
  SavedVersion version_;
  std::shared_ptr<MovedBytes> bytes_;
  std::vector<std::int64_t> sizes_;
  std::vector<std::int64_t> strides_;
  at::TensorOptions options_;
  bool conjugate_;
  bool negative_;
  std::size_t position_;
};

/// What of its storage a tensor needs: from its first to its last element; all of it, if that is half or more, so that
/// the views that an operation made of one storage are one block.
ByteRange range_of(const at::Tensor& tensor) {
  std::size_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += static_cast<std::size_t>(tensor.size(dim) - 1) * static_cast<std::size_t>(tensor.stride(dim));
  const std::size_t begin = static_cast<std::size_t>(tensor.storage_offset()) * tensor.element_size();
  const ByteRange range{begin, begin + (last + 1) * tensor.element_size()};
  const std::size_t whole = tensor.storage().nbytes();
  return 2 * range.bytes() >= whole ? ByteRange{0, whole} : range;
}

class Packer final : public SavedTensors {
 public:
  Packer(std::shared_ptr<ActivationStore> store, std::size_t min_bytes)
      : store_(std::move(store)), min_bytes_(std::max<std::size_t>(1, min_bytes)) {}

  void keep(const std::vector<at::Tensor>& tensors) override {
    const std::scoped_lock lock(mutex_);
    for (const at::Tensor& tensor : tensors) {
      if (tensor.has_storage()) kept_.insert(tensor.storage().unsafeGetStorageImpl());
    }
  }

  [[nodiscard]] std::shared_ptr<SavedTensor> pack(const at::Tensor& tensor, bool move) override {
    const std::scoped_lock lock(mutex_);
    if (!move || !can_move(tensor)) {
      ++counters_.kept;
      return std::make_shared<Kept>(tensor);
    }
    if (++packs_ % kLookAgain == 0)
      std::erase_if(storages_, [](const auto& entry) { return entry.second.storage.expired(); });
    const ByteRange range = range_of(tensor);
    Storage& storage = storages_[tensor.storage().unsafeGetStorageImpl()];
    if (storage.storage.expired()) storage = {tensor.storage().getWeakStorageImpl(), {}};
    std::erase_if(storage.blocks, [](const auto& block) { return block.expired(); });
    for (const std::weak_ptr<MovedBytes>& block : storage.blocks) {
      std::shared_ptr<MovedBytes> there = block.lock();
      if (there == nullptr || !there->serves(tensor, range)) continue;
      ++counters_.shared;
      return std::make_shared<Moved>(tensor, std::move(there));
    }
    auto bytes = std::make_shared<MovedBytes>(store_, tensor, range,
                                              c10::str("saved tensor ", ++counters_.moved, ", ", text_of(tensor)));
    storage.blocks.push_back(bytes);
    return std::make_shared<Moved>(tensor, std::move(bytes));
  }

  [[nodiscard]] SavedTensorCounters counters() const override {
    const std::scoped_lock lock(mutex_);
    return counters_;
  }
  void reset_counters() override {
    const std::scoped_lock lock(mutex_);
    counters_ = {};
  }
  [[nodiscard]] const std::shared_ptr<ActivationStore>& store() const override { return store_; }

 private:
  /// The weak pointer keeps the address from being another storage's.
  struct Storage {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
    std::vector<std::weak_ptr<MovedBytes>> blocks{};
  };

  [[nodiscard]] bool can_move(const at::Tensor& tensor) const {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (tensor.layout() != at::kStrided || !tensor.has_storage() || tensor.is_quantized() ||
        impl.key_set().has(c10::DispatchKey::Python) || !impl.version_counter().enabled()) {
      return false;
    }
    if (store_ == nullptr && tensor.is_cpu()) return false;
    // Memory that torch has not allocated is somebody's own: parameters of an engine, numpy's arrays.
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    return storage->allocator() != nullptr && tensor.numel() > 0 && tensor.nbytes() >= min_bytes_ &&
           !kept_.contains(storage) && storage->data() != nullptr;
  }

  std::shared_ptr<ActivationStore> store_;
  std::size_t min_bytes_;
  mutable std::mutex mutex_;
  std::unordered_set<const c10::StorageImpl*> kept_;
  std::unordered_map<const c10::StorageImpl*, Storage> storages_;
  std::uint64_t packs_ = 0;
  SavedTensorCounters counters_{};
};

}  // namespace

std::shared_ptr<SavedTensors> SavedTensors::create(std::shared_ptr<ActivationStore> store, std::size_t min_bytes) {
  return std::make_shared<Packer>(std::move(store), min_bytes);
}

}  // namespace zeroth::libtorch
