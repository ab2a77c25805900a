// Descriptions of values on their way between stages: dtypes, shapes, and which of them have gradients.
#pragma once

#include <zeroth/comm/communicator.h>
#include <zeroth/libtorch/pipeline.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::libtorch {

/// Values with what autograd needs to know of each tensor. An undefined tensor is a gradient that there is none of.
struct SentValues {
  std::vector<at::Tensor> tensors{};
  std::vector<bool> has_gradient{};  ///< one a tensor
  std::vector<bool> in_slices{};     ///< one a tensor: each rank with the same values sends a slice; empty: none is
  std::vector<bool> on_device{};     ///< one a tensor: it came from a device and goes to one; empty: none does
  std::string structure{};
};

/// Form of values, as bytes that read_form() reads.
[[nodiscard]] std::string form_of(const SentValues& values);
/// Values of this form, their tensors with memory of the host that is not written yet. Throws kMismatch with `from` for
/// bytes that form_of() does not write; no size in them is trusted.
[[nodiscard]] SentValues read_form(std::string_view form, const std::string& from);

/// The tensors of stage `root`, on all stages, in memory of the host; others give anything. Collective, blocks.
[[nodiscard]] std::vector<at::Tensor> shared_by(int root, std::vector<at::Tensor> tensors, const Communicator& stages);

}  // namespace zeroth::libtorch
