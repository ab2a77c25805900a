// InitialValues: rank 0's values become those of all ranks, flat by flat.
#pragma once

#include "zero/model_memory.h"

#include <zeroth/base/tensor_view.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/compute/kernels.h>
#include <zeroth/device/device.h>

#include <cstddef>
#include <functional>

namespace zeroth {

class InitialValues {
 public:
  /// All of them outlive this.
  InitialValues(const ModelLayout& model, ModelMemory& memory, Device& device, Kernels& kernels, Stream stream,
                const Communicator& communicator);

  /// Collective, see Engine::initialize(). Returns the first unit whose values differed here from rank 0's, or -1.
  [[nodiscard]] int bring(const std::function<ConstTensorView(int)>& values, const std::function<void(int)>& release);
  /// Bytes of the temporary buffer: the largest flat.
  [[nodiscard]] std::size_t staging_bytes() const { return staging_bytes_; }

 private:
  void store(int flat, const std::byte* values);

  const ModelLayout& model_;
  ModelMemory& memory_;
  Device& device_;
  Kernels& kernels_;
  Stream stream_;
  const Communicator& communicator_;
  std::size_t staging_bytes_ = 0;
};

}  // namespace zeroth
