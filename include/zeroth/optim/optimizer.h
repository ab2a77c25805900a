// Optimizer: declares its states and updates ranges of parameters. It does not depend on ranks or shards.
#pragma once

#include <zeroth/base/dtype.h>
#include <zeroth/compute/kernels.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// Hyper-parameters of one parameter group at one step, as the user sets them.
struct GroupHyper {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  double momentum = 0.0;
  double dampening = 0.0;
  bool nesterov = false;
  bool operator==(const GroupHyper&) const = default;
};

/// How many entries a state has. A row or tensor that lies on several ranks has an entry on each of them, of what that
/// rank has.
enum class StateShape : std::uint8_t {
  kElement,  ///< one for each element of a parameter
  kRow,      ///< one for each index of a parameter's first dimension; one for a vector or scalar
  kTensor,   ///< one for each parameter
  kRank,     ///< one for each element, and every rank has its own of all elements: error feedback
};

/// A state that the optimizer keeps. The engine allocates it, and hands it out with each block.
struct StateDeclaration {
  std::string name{};
  StateShape shape = StateShape::kElement;
  std::optional<DType> dtype{};  ///< none: the accumulation dtype of the parameter
  double initial = 0.0;          ///< of every entry
};

/// A range of n elements of the accumulation dtype. Blocks do not overlap. The caller owns all memory.
struct StepBlock {
  std::byte* param = nullptr;  ///< [n] of `dtype`; with `low` [n] BFloat16, with `master` [n] Float16
  std::int16_t* low =
      nullptr;  ///< [n] or null: lower halves of the masters of bf16 parameters, [Note: Masters in two halves]
  float* master = nullptr;  ///< [n] or null: masters of fp16 parameters, which are these rounded to nearest even
  /// One pointer per declared state, in order of declaration: to [n] entries, or where the shape is kRow or kTensor to
  /// one. A block lies in one row or tensor then.
  std::span<std::byte* const> states{};
  const std::byte* grad = nullptr;  ///< [n] sums over ranks and micro-steps, not scaled
  std::int64_t n = 0;
  DType dtype = DType::kFloat32;  ///< fp32 or fp64
  double factor = 1.0;            ///< turns the sum into the gradient: averaging, clipping, grad_factor
  std::int64_t step = 1;          ///< number of this update of the parameter, from 1
  GroupHyper hyper{};

  /// Element i before the update, or the master of a 16-bit parameter. T is the type of `dtype`.
  template <class T>
  [[nodiscard]] T value(std::int64_t i) const {
    if (master != nullptr) return static_cast<T>(master[i]);
    return low == nullptr ? reinterpret_cast<const T*>(param)[i]
                          : static_cast<T>(join_master(reinterpret_cast<const BFloat16*>(param)[i], low[i]));
  }
  template <class T>
  void set_value(std::int64_t i, T value) const {
    if (master != nullptr) {
      master[i] = static_cast<float>(value);
      reinterpret_cast<Float16*>(param)[i] = Float16(master[i]);
    } else if (low == nullptr) {
      reinterpret_cast<T*>(param)[i] = value;
    } else {
      split_master(static_cast<float>(value), reinterpret_cast<BFloat16*>(param)[i], low[i]);
    }
  }
};

class Optimizer {
 public:
  Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  virtual ~Optimizer() = default;

  [[nodiscard]] virtual std::string_view name() const = 0;
  /// The same for the life of the optimizer; any number, with different names.
  [[nodiscard]] virtual std::vector<StateDeclaration> states() const = 0;
  /// True if step() is made of calls of Kernels, so that states may lie on a device.
  [[nodiscard]] virtual bool runs_on_device() const { return false; }
  /// Updates one block in place, on the calling thread or, by `kernels`, on `stream`. Any split of a parameter into
  /// blocks gives the same bits.
  virtual void step(const StepBlock& block, Kernels& kernels, const Stream& stream) const = 0;
};

/// `type`: "AdamW", "Adam" or "SGD". `momentum`: SGD keeps a momentum buffer. For another type make_optimizer() throws
/// kConfig with all names, and kUsage for an optimizer with two states of one name.
struct OptimizerOptions {
  std::string type = "AdamW";
  bool momentum = false;
};
[[nodiscard]] std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options);
[[nodiscard]] std::vector<std::string> optimizer_names();

}  // namespace zeroth
