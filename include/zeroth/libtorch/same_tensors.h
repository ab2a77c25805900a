// What ranks that share a model must have alike: its weights before they are split, and every batch.
#pragma once

#include <zeroth/libtorch/rank_group.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

/// Words of the error of require_same().
struct SameTensors {
  std::string where = "libtorch.same";
  std::string what{};  ///< "ranks that share matrices have other weights"
  std::string hint{};
};

/// Compares tensors, under the same names on all ranks, by dtype, shape and a digest of their bytes. A call of all
/// ranks of the group; blocks. Wire: 16 bytes a rank; where they differ, 8 bytes a tensor and rank more. Throws
/// kMismatch on all of them, with the ranks and the first tensor that differs.
void require_same(const std::vector<std::pair<std::string, at::Tensor>>& tensors, const RankGroup& group,
                  const SameTensors& words);

}  // namespace zeroth::libtorch
