// A model as a front end found it, in the core's words. LibTorch modules are read by the engine itself, Python's by the
// shim.
#pragma once

#include <zeroth/shard/param_spec.h>

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace zeroth::libtorch {

struct NamedBuffer {
  std::string name{};
  at::Tensor tensor{};     ///< undefined: it was taken out of the module
  bool persistent = true;  ///< part of the exported weights
};

struct NamedParameter {
  std::string name{};
  at::Tensor tensor{};
  /// Of a parameter that is frozen now: it may become trainable later, and has its bucket, moments and master from the
  /// beginning.
  bool may_train = false;
};

/// A module that is gathered and reduced as one.
struct UnitPath {
  std::string path{};              ///< "blocks.3": parameters below it are the unit's
  const void* identity = nullptr;  ///< the same module under two paths is one unit
  std::string type{};              ///< its class
};

struct ModelDescription {
  std::vector<ParamSpec> params{};
  std::vector<at::Tensor> tensors{};  ///< one a spec: the user's own parameter
  std::vector<UnitSpec> units{};      ///< 0: root; then one an identity, in the order of the paths
  std::vector<NamedBuffer> buffers{};
};

/// Index of a parameter's group; see EngineOptions::groups, which begin at 1. 0: what the configuration says.
using GroupOf = std::function<int(const std::string& name, const at::Tensor& parameter)>;

/// Finds tied weights (one tensor under several names) and the units that look alike. A parameter belongs to the
/// innermost unit around it; one with several names to the innermost unit around all of them. Throws kModel naming what
/// cannot be trained: sparse, meta, overlapping or oddly typed parameters, two over one memory, and such on several
/// devices or on one that is neither the CPU nor CUDA.
[[nodiscard]] ModelDescription describe_model(const std::vector<UnitPath>& units,
                                              const std::vector<NamedParameter>& parameters,
                                              std::vector<NamedBuffer> buffers, const GroupOf& group_of);

}  // namespace zeroth::libtorch
