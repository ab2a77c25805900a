// Description of a model for the core. The engine reads LibTorch modules itself; the Python bindings read Python
// modules.
#pragma once

#include <zeroth/libtorch/parameter_box.h>
#include <zeroth/shard/param_spec.h>

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace zeroth::libtorch {

/// The core's dtype of torch's elements; none for those that the core has not.
[[nodiscard]] std::optional<DType> dtype_of(at::ScalarType type);

struct NamedBuffer {
  std::string name{};
  at::Tensor tensor{};     ///< undefined: the module no longer has it
  bool persistent = true;  ///< part of the exported weights
};

struct NamedParameter {
  std::string name{};
  at::Tensor tensor{};
  /// True for a frozen parameter that may become trainable later: it has a bucket, moments and a master from the
  /// beginning.
  bool may_train = false;
  ParameterBox box{};
};

/// A module that is gathered and reduced as one.
struct UnitPath {
  std::string path{};              ///< "blocks.3": the parameters below it belong to the unit
  const void* identity = nullptr;  ///< the same module under two paths is one unit
  std::string type{};              ///< its class
  int uses = 1;                    ///< UnitSpec::uses; where there are several paths, the first one's counts
};

struct ModelDescription {
  std::vector<ParamSpec> params{};
  std::vector<at::Tensor> tensors{};  ///< one per spec: the user's own parameter
  std::vector<ParamAxes> axes{};      ///< one per spec
  std::vector<UnitSpec> units{};      ///< 0: root; then one per identity, in the order of the paths
  std::vector<NamedBuffer> buffers{};
  /// By name: the rank whose values of a buffer all ranks get, where it is not rank 0: the first one of a stage of a
  /// pipeline that uses it. The same on all ranks.
  std::map<std::string, int> buffer_owners{};
};

/// Index of a parameter's group: 0 is the configuration's group, EngineOptions::groups begin at 1.
using GroupOf = std::function<int(const std::string& name, const at::Tensor& parameter)>;

/// Finds tied weights (one tensor under several names) and repeated units. A parameter belongs to the innermost unit
/// around it; a parameter with several names belongs to the innermost unit around all of them. A frozen parameter may
/// have any dtype with elements of 1, 2, 4 or 8 bytes. Throws kModel with the name for parameters that cannot be
/// trained: sparse, meta, overlapping, of an unsupported dtype, two over one memory, on several devices, or on a device
/// that is neither the CPU nor CUDA.
[[nodiscard]] ModelDescription describe_model(const std::vector<UnitPath>& units,
                                              const std::vector<NamedParameter>& parameters,
                                              std::vector<NamedBuffer> buffers, const GroupOf& group_of);

}  // namespace zeroth::libtorch
