// Optimizer: declares its states and updates ranges of parameters. It does not depend on ranks or shards.
#pragma once

#include <zeroth/base/dtype.h>
#include <zeroth/compute/kernels.h>
#include <zeroth/optim/optimizer_options.h>

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
  kRank,     ///< one for each element, and every rank has its own of all elements: error feedback of what it sends
  kReplica,  ///< one for each element, and every rank has all of them, the same ones: what messages begin with
  kPiece,    ///< one for each element of the rank's piece of a flat, whoever updates it: error feedback of sums
};
/// One entry for each element, and not for rows or tensors.
[[nodiscard]] constexpr bool has_elements(StateShape shape) noexcept {
  return shape != StateShape::kRow && shape != StateShape::kTensor;
}

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
  /// [n] sums over ranks and micro-steps, not scaled. Null: the ranks' messages have formed the states that the
  /// optimizer names in SignMessages, or measure() has used them up.
  const std::byte* grad = nullptr;
  std::int64_t n = 0;
  DType dtype = DType::kFloat32;  ///< fp32 or fp64
  double factor = 1.0;            ///< turns the sum into the gradient: averaging, clipping, grad_factor
  std::int64_t step = 1;          ///< number of this update of the parameter, from 1
  GroupHyper hyper{};
  double scale = 1.0;            ///< for step(): what conclude() made of the whole parameter; else MessageTerms::rates
  bool from_messages = false;    ///< there are no sums in this update
  std::int64_t local_steps = 0;  ///< updates of this rank's own since the last exchange, without this one
  std::int64_t committed = 0;    ///< updates of the engine before this one

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

/// An optimizer whose ranks exchange messages in the place of gradients (zero/message_reduction.h):
/// message = momentum_factor * state + grad_factor * gradient + sum_factor * sum, and the state gets the mean over
/// ranks. By the numbers of the states that it declares.
struct SignMessages {
  int state = 0;            ///< kReplica
  int worker_error = 0;     ///< kRank
  int server_error = 0;     ///< kPiece
  int sum = -1;             ///< kRank: of what a rank has not sent in the steps before; -1: there is none
  bool reads_state = true;  ///< messages begin with the state, so every rank needs the owners' parts of it
  bool begins = false;      ///< the first messages of a phase: errors are set to zero before
  bool exchanges = true;    ///< false: nothing is sent, and each rank updates with its own gradients
};
/// Of a parameter, when messages are formed.
struct MessageTerms {
  GroupHyper hyper{};
  std::int64_t committed = 0;  ///< updates of the engine before this one
  std::int64_t step = 1;       ///< number of this update of the parameter
  double rates = 0.0;          ///< sum of Optimizer::rate() since the last exchange, this update's with it
};
/// Of the messages of a parameter.
struct MessageFactors {
  double momentum = 0.0;
  double grad = 1.0;
  double sum = 0.0;
};

/// A number that an update needs of a whole parameter, whatever ranks, boxes of a larger tensor and blocks its elements
/// are in. It is made of one number for each block of kernels::kNormBlock elements, exactly.
enum class TensorFact : std::uint8_t {
  kNorm,      ///< of sums of squares: the root of their sum
  kGreatest,  ///< of numbers that are not negative
};

/// Of an optimizer that freezes its variances.
struct Freezing {
  std::string state{};     ///< the variances, as it declares them
  std::int64_t step = 0;   ///< updates before they are frozen
  double threshold = 0.0;  ///< OptimizerOptions::freeze_threshold
};

/// A parameter of which all ranks know the facts.
struct TensorUpdate {
  std::span<const double> facts{};
  /// One entry per declared state: of states of shape kTensor; the others have 0.
  std::span<double> states{};
  std::int64_t step = 1;
  GroupHyper hyper{};
  bool from_messages = false;
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
  /// What ranks exchange for the update after `committed` ones: none, gradients. The same on all ranks. Where this is
  /// ever something, states of the update rest where they are used.
  [[nodiscard]] virtual std::optional<SignMessages> messages(std::int64_t /*committed*/) const { return std::nullopt; }
  /// It has messages at some update.
  [[nodiscard]] virtual bool has_messages() const { return false; }
  /// For a line at the start of a run, "from step 2001 on ...": what of the training is not that of exact sums of
  /// gradients; "" if all of it is.
  [[nodiscard]] virtual std::string lossy_part() const { return ""; }
  [[nodiscard]] virtual MessageFactors message_factors(const MessageTerms& /*terms*/) const { return {}; }
  [[nodiscard]] virtual std::optional<Freezing> freezing() const { return std::nullopt; }
  /// Changes Freezing::step. Between steps, on all ranks.
  virtual void freeze_at(std::int64_t /*step*/) {}
  /// At some update ranks update with their own gradients: their parameters are their own until the next exchange, so
  /// every rank must have all of them.
  [[nodiscard]] virtual bool has_local_steps() const { return false; }
  /// How far an update goes, in units of the momentum: what MessageTerms::rates sums up, and StepBlock::scale is.
  [[nodiscard]] virtual double rate(const GroupHyper& /*hyper*/, std::int64_t /*step*/) const { return 0.0; }
  /// What the update after `committed` ones needs to know of whole parameters. The same on all ranks. If it is
  /// anything, measure() is called for all blocks of all parameters, then conclude() for each parameter, then step()
  /// for all blocks, without gradients. States rest where they are used.
  [[nodiscard]] virtual std::vector<TensorFact> facts(std::int64_t /*committed*/) const { return {}; }
  /// It has facts at some update.
  [[nodiscard]] virtual bool has_facts() const { return false; }
  /// The first pass over a block: writes one number for each kernels::kNormBlock of its elements, the last of which may
  /// be fewer, to each of `measures`, one a fact; may update states, and not the parameter. On the calling thread or,
  /// by `kernels`, on `stream`.
  virtual void measure(const StepBlock& /*block*/, std::span<double* const> /*measures*/, Kernels& /*kernels*/,
                       const Stream& /*stream*/) const {}
  /// Once for each parameter that a rank has elements of: gives StepBlock::scale, and may update states of tensors.
  [[nodiscard]] virtual double conclude(const TensorUpdate& /*tensor*/) const { return 1.0; }
  /// Updates one block in place, on the calling thread or, by `kernels`, on `stream`. Any split of a parameter into
  /// blocks gives the same bits.
  virtual void step(const StepBlock& block, Kernels& kernels, const Stream& stream) const = 0;
};

/// Throws kConfig with all names for another type, and kUsage for an optimizer with two states of one name.
[[nodiscard]] std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options);
[[nodiscard]] std::vector<std::string> optimizer_names();

}  // namespace zeroth
