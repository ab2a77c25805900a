// The dtype that the configuration asks for: a float32 model takes it (zeroth.cast).
#pragma once

#include <zeroth/engine/config.h>
#include <zeroth/libtorch/model_description.h>

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

/// Tensors with their values from before. The destructor gives them back, unless forget() was called.
class OriginalValues {
 public:
  OriginalValues() = default;
  OriginalValues(OriginalValues&& other) noexcept : values_(std::exchange(other.values_, {})) {}
  OriginalValues& operator=(OriginalValues&&) = delete;
  OriginalValues(const OriginalValues&) = delete;
  OriginalValues& operator=(const OriginalValues&) = delete;
  ~OriginalValues();

  /// Casts `tensor` in place.
  void cast(const at::Tensor& tensor, at::ScalarType dtype);
  void forget() noexcept { values_.clear(); }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> values_;
};

/// The dtype that float32 parameters of the model are to have; none: theirs. Throws what cast_model() throws.
[[nodiscard]] std::optional<DType> dtype_to_cast_to(const Config& config, const ModelDescription& model);

/// Where bf16 or fp16 is enabled: casts the float32 parameters and buffers of a model in which no trainable parameter
/// has the dtype yet, as model.to(dtype) would; in one that has it, the user's dtypes stay. Throws kConfig for a model
/// that has another 16-bit dtype, for one in float32 if zeroth.cast is false, and for float16 parameters that train
/// where fp16 is not enabled.
[[nodiscard]] OriginalValues cast_model(const Config& config, ModelDescription& model);

}  // namespace zeroth::libtorch
