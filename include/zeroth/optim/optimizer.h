// Optimizer: declares its states and updates ranges. It knows nothing of ranks, shards or tiers.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// Hyper-parameters of one parameter group at one step, as users give them.
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

/// An optimizer declares at most as many states: the engine collects their pointers for each block without allocating.
inline constexpr std::size_t kMaxOptimizerStates = 4;

/// A state that the optimizer keeps beside each parameter, in accumulation dtype, zero at first.
struct StateDeclaration {
  std::string name;
};

/// Any range of one parameter: n elements of the accumulation dtype. Ranges of different blocks do not overlap.
struct StepBlock {
  std::byte* param = nullptr;  ///< [n] of `dtype`; with `low` [n] BFloat16
  std::int16_t* low =
      nullptr;  ///< [n] or null: what bf16 parameters lack of their masters, [Note: Masters in two halves]
  std::span<std::byte* const> states{};  ///< one [n] pointer per declared state, in order of declaration
  const std::byte* grad = nullptr;       ///< [n] sums over ranks and micro-steps, not scaled
  std::int64_t n = 0;
  DType dtype = DType::kFloat32;  ///< fp32 or fp64
  double factor = 1.0;            ///< what turns the sum into the gradient: averaging, clipping, grad_factor
  std::int64_t step = 1;          ///< updates of this parameter including this one, from 1
  GroupHyper hyper{};

  /// Element i to update, as T, which is `dtype`: of a bf16 parameter its master.
  template <class T>
  [[nodiscard]] T value(std::int64_t i) const {
    return low == nullptr ? reinterpret_cast<const T*>(param)[i]
                          : static_cast<T>(join_master(reinterpret_cast<const BFloat16*>(param)[i], low[i]));
  }
  template <class T>
  void set_value(std::int64_t i, T value) const {
    if (low == nullptr) {
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
  /// The same for the life of the optimizer; at most kMaxOptimizerStates.
  [[nodiscard]] virtual std::vector<StateDeclaration> states() const = 0;
  /// Updates one block on the calling thread. Any split of a parameter into blocks gives the same bits.
  virtual void step(const StepBlock& block, kernels::Isa isa) const = 0;
};

/// What is built: "AdamW", "Adam", "SGD". `momentum` decides whether SGD keeps a momentum buffer.
/// Throws kConfig naming what is built for any other name, and kUsage for an optimizer of too many states.
struct OptimizerOptions {
  std::string type = "AdamW";
  bool momentum = false;
};
[[nodiscard]] std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options);
[[nodiscard]] std::vector<std::string> optimizer_names();

}  // namespace zeroth
