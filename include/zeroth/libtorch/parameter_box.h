// ParameterBox: what a rank's parameter is of the parameter of the whole model, for modules that ranks share.
#pragma once

#include <zeroth/engine/param_axes.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

struct ParameterBox {
  /// Shape of the whole tensor, and where the parameter begins in it, one entry a dimension. Empty: it is the whole.
  std::vector<std::int64_t> logical_shape{};
  std::vector<std::int64_t> offset{};
  int parts = 1;  ///< the same box of so many equal blocks of dimension parts_dim; see ParamSpec::box_parts
  int parts_dim = 0;
  ParamAxes axes{};  ///< along which ranks have other boxes, or parts of the gradient
  /// Names of the whole tensor, where a rank has several boxes of it; the first one is that of checkpoints, the others
  /// are tied. Empty: those of the parameter.
  std::vector<std::string> names{};
};

/// A module that says so of its own parameters. Engines ask every module of a model.
class SplitModule {
 public:
  SplitModule() = default;
  SplitModule(const SplitModule&) = delete;
  SplitModule& operator=(const SplitModule&) = delete;
  virtual ~SplitModule() = default;
  /// By the names under which the module registered its parameters. Those that are not named are the same on all ranks
  /// that share the module, and so are their gradients.
  [[nodiscard]] virtual std::vector<std::pair<std::string, ParameterBox>> boxes() const = 0;
};

}  // namespace zeroth::libtorch
