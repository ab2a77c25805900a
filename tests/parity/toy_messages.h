// Trainings of the toy model whose ranks exchange messages of one bit.
#pragma once

#include "toy_engine.h"

#include <zeroth/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zeroth::test {

inline constexpr int kFreeze = 3;

[[nodiscard]] inline ToyTraining onebit(int stage, int world, DType dtype = DType::kFloat32,
                                        const char* optimizer = "OneBitAdam") {
  ToyTraining training{.plan = zero_plan(stage, {"dp"}), .world = world, .steps = 8, .optimizer = optimizer};
  training.model.dtype = dtype;
  training.model.frozen_blocks = {1};
  training.model.round_gradients = size_of(dtype) == 2;
  training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
    settings.optimizer.freeze_step = kFreeze;
    settings.optimizer.zero_one = {.var_freeze_step = 5, .var_update_scaler = 2, .local_step_clipper = 1};
  };
  return training;
}

[[nodiscard]] inline ToyTraining with_setting(ToyTraining training,
                                              const std::function<void(int rank, EngineSettings&)>& change) {
  training.tamper = [before = training.tamper, change](int rank, ToyStructure& structure, EngineSettings& settings) {
    if (before) before(rank, structure, settings);
    change(rank, settings);
  };
  return training;
}

/// The optimizer of the settings, after each block of which `after` does what no optimizer does.
class Meddled final : public Optimizer {
 public:
  using After = std::function<void(const StepBlock&)>;
  Meddled(const OptimizerOptions& options, After after) : inner_(make_optimizer(options)), after_(std::move(after)) {}

  std::string_view name() const override { return inner_->name(); }
  std::vector<StateDeclaration> states() const override { return inner_->states(); }
  bool runs_on_device() const override { return inner_->runs_on_device(); }
  std::optional<SignMessages> messages(std::int64_t committed) const override { return inner_->messages(committed); }
  bool has_messages() const override { return inner_->has_messages(); }
  MessageFactors message_factors(const MessageTerms& terms) const override { return inner_->message_factors(terms); }
  std::optional<Freezing> freezing() const override { return inner_->freezing(); }
  void freeze_at(std::int64_t step) override { inner_->freeze_at(step); }
  void step(const StepBlock& block, Kernels& kernels, const Stream& stream) const override {
    inner_->step(block, kernels, stream);
    after_(block);
  }

 private:
  std::unique_ptr<Optimizer> inner_;
  After after_;
};

/// `after`: of each rank; unset on a rank: nothing.
[[nodiscard]] inline ToyTraining meddled(ToyTraining training, const std::function<Meddled::After(int rank)>& after) {
  return with_setting(std::move(training), [after](int rank, EngineSettings& settings) {
    const Meddled::After own = after(rank);
    if (!own) return;
    settings.own_optimizer = [options = settings.optimizer, own] { return std::make_unique<Meddled>(options, own); };
  });
}

}  // namespace zeroth::test
