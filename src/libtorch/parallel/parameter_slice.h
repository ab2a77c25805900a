// This rank's slice of a parameter that the ranks of a group share, and its box.
#pragma once

#include "libtorch/parallel/group_call.h"

#include <zeroth/libtorch/parameter_box.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace zeroth::libtorch {

/// Own slice of a dim, of each of its `parts` equal blocks, of memory of its own, without a gradient.
[[nodiscard]] at::Tensor part_of(const at::Tensor& whole, std::int64_t dim, SizeSpan sizes, const RankGroup& group,
                                 int parts = 1);

/// The box of a parameter that is such a slice.
[[nodiscard]] ParameterBox box_of(const at::Tensor& part, std::int64_t dim, SizeSpan sizes, const RankGroup& group,
                                  const std::string& axis, int parts = 1);

}  // namespace zeroth::libtorch
