// Description of a model: its parameters by name, and its units, which are gathered and reduced together.
#pragma once

#include <zeroth/base/dtype.h>

#include <cstdint>
#include <string>
#include <vector>

namespace zeroth {

/// One distinct parameter. Tied weights are one spec with several names.
struct ParamSpec {
  std::string name{};
  std::vector<std::int64_t> shape{};  ///< dense; empty means a scalar
  DType dtype = DType::kFloat32;      ///< fp64, fp32 or bf16; a frozen one's says no more than the size of elements
  bool trainable = true;
  bool separate = false;               ///< its flat has no matrices, if it has fewer than two dimensions
  int group = 0;                       ///< index into the optimizer's parameter groups
  int shard_group = 0;                 ///< index into EngineSettings::shard_groups
  double grad_factor = 1.0;            ///< multiplies the gradient in the update (experts and the like)
  std::vector<std::string> aliases{};  ///< other names of the same tensor
  /// The tensor that this rank's parameter is a box of, `shape` elements from `box_offset` on: rows of a matrix that
  /// ranks split, an expert of several. Empty: the parameter is the whole tensor.
  std::vector<std::int64_t> logical_shape{};
  std::vector<std::int64_t> box_offset{};  ///< one entry for each dimension of logical_shape
  /// Name of that tensor, where a rank has several boxes of it, each under a name of its own: tiles of a table of which
  /// other ranks have one. `aliases` are the tensor's, too. Empty: `name`.
  std::string whole{};
  /// Dimension `box_parts_dim` of the tensor is so many equal blocks, and the parameter has the same box of each, one
  /// after the other: query, key and value in one matrix. box_offset counts inside of a block.
  int box_parts = 1;
  int box_parts_dim = 0;
  /// How the elements follow each other in memory: its dimensions, the one with the largest stride first. Empty: row
  /// major, as every box of a larger tensor is.
  std::vector<int> memory_order{};

  /// Under which states are saved and read.
  [[nodiscard]] const std::string& tensor_name() const { return whole.empty() ? name : whole; }
  [[nodiscard]] std::int64_t numel() const {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    return count;
  }
  bool operator==(const ParamSpec&) const = default;
};

/// Parameters that are gathered and reduced together: by default those of a transformer block. `params` index the
/// model's ParamSpec list. Every parameter belongs to exactly one unit. A unit may have parameters of several shard
/// groups.
struct UnitSpec {
  std::string name{};
  std::vector<int> params{};
  bool repeated =
      false;  ///< one of several units of the same form, which share a ring of slots; others have their own slot
  /// Its forwards in a micro-step, far from each other: a tile of a matrix that is embedding and head has two. The plan
  /// of gathers counts them.
  int uses = 1;
  bool operator==(const UnitSpec&) const = default;
};

}  // namespace zeroth
