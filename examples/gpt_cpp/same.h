// What ranks that share a model's matrices must have alike.
#pragma once

#include <zeroth/libtorch/rank_group.h>

#include <torch/types.h>

#include <string>
#include <utility>
#include <vector>

namespace gpt {

/// Compares tensors, under the same names on all ranks, by dtype, shape and a digest of their bytes: 8 bytes a tensor
/// and rank. A call of all ranks of the group.
/// @throws zeroth::Error kMismatch on all of them: `what`, with the ranks and the first tensor that differs.
void require_same(const std::vector<std::pair<std::string, torch::Tensor>>& tensors,
                  const zeroth::libtorch::RankGroup& group, const std::string& what, const std::string& hint);

}  // namespace gpt
