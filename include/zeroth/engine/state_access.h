// States of an engine by the names of the model: read whole or in parts, written whole.
//
// One path for every stage, placement and box: a state is cut into ranges of logical tensors, as a checkpoint is, and
// every element comes from the one rank that would write it there.
#pragma once

#include <zeroth/base/dtype.h>
#include <zeroth/checkpoint/box_range.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// What is asked of all ranks alike. Kinds: "param" (in the dtype of computation), "master" (the value that is updated:
/// float32 of a 16-bit parameter, else the parameter itself), "grad" (the mean over ranks and micro-steps, not
/// clipped, as the update would take it), the states that the optimizer declares, and averages.
struct StateQuery {
  std::string kind = "param";
  std::vector<std::string> names{};  ///< of parameters, or aliases; empty: every parameter that has the state
  std::vector<int> ranks{};          ///< that get the values; empty: all
  bool partial = false;              ///< names without the state are left out; else they are an error
};

/// A whole logical tensor in host memory, row major (or in the parameter's own memory order, where a front end has
/// another).
struct StateTensor {
  std::string name{};  ///< of the parameter, never an alias
  std::vector<std::int64_t> shape{};
  DType dtype = DType::kFloat32;
  std::vector<std::byte> data{};
};

/// What this rank keeps of a state: a copy.
struct StatePart {
  std::string name{};
  BoxRange range{};  ///< of the logical tensor
  DType dtype = DType::kFloat32;
  std::vector<std::byte> data{};
};

/// New values for weights. All ranks say the same.
struct WeightWrite {
  std::vector<std::string> names{};  ///< of parameters, or aliases
  /// The rank that has the values; -1: every rank has the same ones.
  int source = 0;
  /// True: values are masters (StateQuery::kind "master"). False: they are in the parameter's dtype, and an element
  /// whose value does not change keeps its master to the bit.
  bool masters = true;
  /// Dtype of the values of names[index], where it is another floating-point one: a rank converts what it takes. With
  /// `source` -1 alone. Unset: as `masters` says.
  std::function<DType(std::size_t index)> dtype{};
  /// All elements of names[index]; called once for each, where they are. Good until the next call. With `source` -1 a
  /// rank reads only the elements that it keeps: the rest of a mapped file is not touched.
  std::function<std::span<const std::byte>(std::size_t index)> values{};
};

}  // namespace zeroth
