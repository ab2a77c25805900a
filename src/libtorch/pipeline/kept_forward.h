// KeptForward: what a chunk's forward needs to run a second time with the same bits, in the place of its graph: its
// inputs, and random numbers and buffers as they were before it.
//
//   KeptForward kept(inputs, buffers, device);
//   forward(kept.inputs());
//   kept.ran(buffers);                       // keeps of the buffers what the forward has written
//   ...                                      // other forwards draw random numbers and write buffers
//   kept.again(buffers, [&] { forward(kept.inputs()); });
#pragma once

#include "libtorch/pipeline/stage_values.h"

#include <zeroth/libtorch/saved_tensors.h>

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace zeroth::libtorch {

/// The states of torch's generators of the CPU and of a device.
class RandomState {
 public:
  [[nodiscard]] static RandomState now(c10::Device device);
  void set() const;
  [[nodiscard]] std::size_t bytes() const;

 private:
  struct Of {
    at::Generator generator;
    at::Tensor state;
  };
  std::vector<Of> states_;
};

/// The tensors that a forward may write, as they are now: always as many, in the same order. Another tensor in the
/// place of one is a write too.
using Buffers = std::function<std::vector<at::Tensor>()>;

class KeptForward {
 public:
  /// Before the forward. The tensors of `inputs` are shared.
  KeptForward(SentValues inputs, const Buffers& buffers, c10::Device device);
  /// After it. Throws kModel if it has written one of its inputs: it cannot run again.
  void ran(const Buffers& buffers);

  /// Tensors of the same memory without a graph.
  [[nodiscard]] SentValues inputs() const;
  /// FLUSH and FETCH of the inputs. fetch() blocks until they are there.
  void flush(SavedTensors& saved);
  void fetch();
  /// In memory, of inputs, written buffers and states of generators.
  [[nodiscard]] std::size_t bytes() const;

  /// Runs `forward` with random numbers and buffers as they were; then both are as before the call.
  void again(const Buffers& buffers, const std::function<void()>& forward) const;

 private:
  void require_unwritten() const;

  struct Written {
    std::size_t index = 0;  ///< in the list of buffers
    at::Tensor before;      ///< a copy
    bool counted = false;   ///< torch has counted the write as a new version
  };
  void put(const std::vector<at::Tensor>& values, const std::vector<at::Tensor>& into) const;

  SentValues inputs_;
  std::vector<std::uint32_t> versions_;                ///< of the inputs
  std::vector<std::shared_ptr<SavedTensor>> flushed_;  ///< one an input, between FLUSH and FETCH
  c10::Device device_;
  RandomState random_;
  std::vector<at::Tensor> buffers_;  ///< before the forward; empty after ran()
  std::vector<std::uint32_t> buffer_versions_;
  std::vector<Written> written_;
};

}  // namespace zeroth::libtorch
