// A torch-free model with a hand-written backward, driven through the five events of the engine.
//
//   h = act(W_in x + b_in);  for each block: h = h + act(W_k h + b_k);  y = W_out h;  loss = mean (y - target)^2 / 2
//   act(z) = z / (1 + |z|): IEEE operations only, so that losses have the same bits on every machine.
//
// The blocks are the repeated units; in and out are one root unit. Options give frozen parameters, a block that is used
// twice, a tied weight (block 0 and block 1 share W), and blocks that some ranks skip in some steps. Compute type:
// double for fp64 parameters, float otherwise; gradients are handed over in that type, or in the parameters' own.
#pragma once

#include <zeroth/engine/engine.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {

struct ToyOptions {
  int inputs = 5;
  int width = 7;
  int blocks = 4;
  DType dtype = DType::kFloat32;
  bool reuse_last = false;           ///< the last block is applied twice in a row
  bool tie_first_two = false;        ///< W of block 1 is W of block 0
  std::vector<int> frozen_blocks{};  ///< their W is frozen (b stays trainable)
  std::vector<int> memory_order{};   ///< of W, as its ParamSpec says it; nothing here computes with it
  int batch = 3;
  bool round_gradients = false;  ///< of bf16 parameters that are used once gradients are given in bf16, as torch does
  int wide_rank = -1;            ///< but not on this rank
};

/// Values and structure; a pure function of options and seed.
struct ToyStructure {
  std::vector<ParamSpec> params{};
  std::vector<UnitSpec> units{};  ///< 0: root, 1..: blocks
  std::vector<std::vector<double>> values{};
};
[[nodiscard]] ToyStructure make_toy(const ToyOptions& options, std::uint64_t seed);

/// Skips block `block` on this rank in this micro-step.
using SkipRule = std::function<bool(int rank, std::int64_t step, int block)>;

/// Memory of a device that the host cannot read. One a rank.
class ToyMemory {
 public:
  ToyMemory() = default;
  ToyMemory(const ToyMemory&) = delete;
  ToyMemory& operator=(const ToyMemory&) = delete;
  virtual ~ToyMemory() = default;
  /// Blocks until `bytes` bytes at `from`, of the device, are at `to`, of the host.
  virtual void read(void* to, const std::byte* from, std::size_t bytes) = 0;
  /// A copy on the device of `bytes` bytes of the host. It lives until the next call.
  virtual const std::byte* place(const std::byte* from, std::size_t bytes) = 0;
};

/// The model bound to an engine.
class ToyModel final : public ParameterBinder {
 public:
  ToyModel(const ToyOptions& options, std::uint64_t seed);

  [[nodiscard]] const ToyStructure& structure() const { return structure_; }
  void bind(int flat, std::byte* data) override;
  void begin_update(int flat) override;

  /// Collective: builds the engine's values from this model's.
  void attach(Engine& engine);
  /// Forward and backward of one micro-batch with data of (rank, step, micro_step); returns the loss of this rank.
  double forward_backward(std::int64_t step, int micro_step, const SkipRule& skip = {});
  /// Parameters are in this memory and gradients are given there; unset: in memory that the host reads.
  void set_memory(std::unique_ptr<ToyMemory> memory) { memory_ = std::move(memory); }
  /// Takes the data of another rank from now on.
  void take_data_of(int rank) { data_rank_ = rank; }
  /// Forward alone, without a backward to come.
  double evaluate(std::int64_t step, int micro_step);
  /// Gradients of parameter `param` become NaN where the rule says so.
  using PoisonRule = std::function<bool(int rank, std::int64_t step, int micro_step, int param)>;
  void set_poison(PoisonRule rule) { poison_ = std::move(rule); }
  /// Every element of a gradient is this rank's number: where orders of sums must differ by choice, not by chance.
  using ChosenRule = std::function<double(int rank)>;
  void set_chosen(ChosenRule rule) { chosen_ = std::move(rule); }
  /// The bias of block `block` gets no gradient on this rank, or one of zeros.
  void set_left_out(SkipRule rule, bool gives_zeros) {
    left_out_ = std::move(rule);
    gives_zeros_ = gives_zeros;
  }
  /// Called when the parameters of a unit are there, in its forward and in its backward.
  using Visitor = std::function<void(bool backward, int unit)>;
  void set_visitor(Visitor visitor) { visitor_ = std::move(visitor); }
  /// Called with the unit of a flat whose update begins inside of a backward.
  void set_update_watcher(std::function<void(int unit)> watcher) { update_watcher_ = std::move(watcher); }
  /// The current value of a parameter, from the engine.
  [[nodiscard]] std::vector<double> value(int param);

 private:
  template <class T>
  double run(std::int64_t step, int micro_step, const SkipRule& skip, bool backward);
  template <class T>
  [[nodiscard]] std::vector<T> load(int param) const;
  template <class T>
  void give(int param, const std::vector<T>& grad, bool is_sum = false);
  void hand_over(int param, const std::byte* values, DType dtype);
  void visit(bool backward, int unit) const {
    if (visitor_) visitor_(backward, unit);
  }

  ToyOptions options_;
  ToyStructure structure_;
  Engine* engine_ = nullptr;
  std::vector<std::byte*> flats_;
  std::unique_ptr<ToyMemory> memory_;
  PoisonRule poison_;
  ChosenRule chosen_;
  SkipRule left_out_;
  bool gives_zeros_ = false;
  Visitor visitor_;
  std::function<void(int unit)> update_watcher_;
  std::int64_t step_ = 0;
  int micro_step_ = 0;
  int data_rank_ = -1;  ///< -1: its own
};

/// Data of one micro-batch.
struct ToyBatch {
  std::vector<double> x{};       ///< [batch, inputs]
  std::vector<double> target{};  ///< [batch]
};
[[nodiscard]] ToyBatch toy_batch(const ToyOptions& options, int rank, std::int64_t step, int micro_step);

}  // namespace zeroth::test
