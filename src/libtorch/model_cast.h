// The dtype that the configuration asks for: a float32 model takes it (zeroth.cast).
#pragma once

#include <zeroth/engine/config.h>
#include <zeroth/libtorch/model_description.h>

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
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

/// What cast_model() has done, for the log: "cast to bf16: 12 parameters, 1 buffer; float32 stays in 1 buffer that is
/// not saved: rotary.inv_freq". "" where it has cast nothing.
struct CastLog {
  std::string text{};
};

/// Where bf16 or fp16 is enabled: casts the float32 parameters and persistent buffers of a model in which no trainable
/// parameter has the dtype yet; in one that has it, the user's dtypes stay. Buffers that are not persistent keep their
/// dtype: they are tables that the model's code computes (frequencies of rotary embeddings), and whoever loads the
/// exported weights computes them anew in float32. Throws kConfig for a model
/// that has another 16-bit dtype, for one in float32 if zeroth.cast is false, and for float16 parameters that train
/// where fp16 is not enabled.
[[nodiscard]] OriginalValues cast_model(const Config& config, ModelDescription& model, CastLog& log);

}  // namespace zeroth::libtorch
