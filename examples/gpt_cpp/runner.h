// How the trainer runs its model: whole on every rank, or in the stages of a pipeline.
//
// Shape letters: B batch, T sequence, V vocabulary.
#pragma once

#include "model.h"
#include "options.h"

#include <zeroth/engine/step_result.h>
#include <zeroth/engine/world.h>
#include <zeroth/libtorch/engine.h>

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace gpt {

struct Batch {
  torch::Tensor x_BT{};  ///< int64 bytes
  torch::Tensor y_BT{};  ///< int64, the bytes after them
  double weight = 1.0;   ///< of the loss, in evaluate()
};

/// All calls are collective and block.
class Runner {
 public:
  Runner() = default;
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;
  virtual ~Runner() = default;

  [[nodiscard]] virtual zeroth::libtorch::EngineBase& engine() = 0;

  struct Step {
    zeroth::StepResult result{};
    double loss = 0.0;  ///< mean over micro-steps and ranks
  };
  /// One step. `batch(micro_step)` makes the rank's batches.
  virtual Step train(const std::function<Batch(std::int64_t micro_step)>& batch) = 0;
  /// Weighted mean of the losses of all ranks' batches. `weights`: the sum of the weights of all ranks.
  virtual double evaluate(const std::vector<Batch>& batches, double weights) = 0;
  /// [B, T, V], on all ranks. All ranks give the same x.
  virtual torch::Tensor logits(const torch::Tensor& x_BT) = 0;
};

/// `measured`: called after each forward, backward and step, while what they need is there.
[[nodiscard]] std::unique_ptr<Runner> make_runner(const Gpt& model, const Settings& settings,
                                                  const zeroth::World& world, std::function<void()> measured);

}  // namespace gpt
