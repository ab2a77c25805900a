// Tensors that autograd saves for backward, resting in files or in the memory of the host.
//
//   pack(x)     bytes of x's storage -> ActivationStore      what torch's pack hook calls
//   unpack()    the same bytes, strides and alignment        what its unpack hook calls
//
// A backward computes with the bits that were saved, so its gradients are those without a move. Views of one storage
// are one block, whoever saves them and however often.
#pragma once

#include <zeroth/offload/activation_store.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace zeroth::libtorch {

/// What a SavedTensors has done.
struct SavedTensorCounters {
  std::uint64_t moved = 0;   ///< tensors that were copied to files or to the host
  std::uint64_t shared = 0;  ///< tensors whose bytes were there already
  std::uint64_t kept = 0;    ///< tensors that stayed: parameters, small ones, ones whose caller wants it
  bool operator==(const SavedTensorCounters&) const = default;
};

/// A tensor as it was saved. Its end drops the block, with that of the last one that shares it. Any thread.
class SavedTensor {
 public:
  SavedTensor() = default;
  SavedTensor(const SavedTensor&) = delete;
  SavedTensor& operator=(const SavedTensor&) = delete;
  virtual ~SavedTensor() = default;

  /// The tensor: sizes, strides, dtype, device and bits. May be called again. Blocks for files.
  /// Throws kUsage if the tensor has been modified in place since it was saved, as torch without hooks does; else as
  /// ActivationStore::get().
  [[nodiscard]] virtual at::Tensor unpack() const = 0;
  [[nodiscard]] virtual bool moved() const = 0;
};

/// Packs tensors. Thread safe.
class SavedTensors {
 public:
  /// `store`: for files; null: tensors of a GPU go to the host's memory, those of the host stay. Tensors of less than
  /// `min_bytes` stay.
  [[nodiscard]] static std::shared_ptr<SavedTensors> create(std::shared_ptr<ActivationStore> store,
                                                            std::size_t min_bytes);
  SavedTensors() = default;
  SavedTensors(const SavedTensors&) = delete;
  SavedTensors& operator=(const SavedTensors&) = delete;
  virtual ~SavedTensors() = default;

  /// Storages that are never moved: those of parameters and buffers.
  virtual void keep(const std::vector<at::Tensor>& tensors) = 0;
  /// `move`: false: the tensor stays where it is. Blocks while the store's slots are on their way to files. Throws as
  /// ActivationStore::put().
  [[nodiscard]] virtual std::shared_ptr<SavedTensor> pack(const at::Tensor& tensor, bool move) = 0;

  [[nodiscard]] virtual SavedTensorCounters counters() const = 0;
  virtual void reset_counters() = 0;
  /// Null without files.
  [[nodiscard]] virtual const std::shared_ptr<ActivationStore>& store() const = 0;
};

}  // namespace zeroth::libtorch
