#include "libtorch/gradient_guards.h"

#include <zeroth/base/error.h>

#include <string>

namespace zeroth::libtorch {

void GradientGuards::make() {
  for (const int param : trainable_) {
    const std::string& name = model_.params[static_cast<std::size_t>(param)].name;
    guards_.push_back(slots_.guard_like(
        param, Error(ErrorCode::kUsage, "the gradient of '" + name + "' is in the engine, not here",
                     {.where = "libtorch.gradient",
                      .which = name,
                      .hint = "engine.full(\"" + name +
                              "\", \"grad\") on all ranks gives it, averaged; engine.step() clips it "
                              "(gradient_clipping in the configuration), reports its norm "
                              "(StepResult.grad_norm) and updates the parameter; a hook on the parameter sees it as it "
                              "arrives; a further backward that does not begin at an output of the model runs through "
                              "engine.backward(loss)"})));
  }
}

void GradientGuards::set() {
  if (guards_.empty()) return;
  for (std::size_t index = 0; index < trainable_.size(); ++index) {
    const at::Tensor& tensor = slots_.tensor(trainable_[index]);
    if (!tensor.requires_grad()) continue;
    tensor.mutable_grad() = guards_[index];
    guarded_.push_back(index);
  }
}

void GradientGuards::require_there() const {
  for (const std::size_t index : guarded_) {
    const at::Tensor& tensor = slots_.tensor(trainable_[index]);
    ZR_CHECK(tensor.grad().is_same(guards_[index]), ErrorCode::kUsage,
             "a gradient was set or deleted after backward, but it is in the engine, not in .grad",
             {.where = "libtorch.gradient",
              .which = model_.params[static_cast<std::size_t>(trainable_[index])].name,
              .expected = ".grad left alone from backward to step()",
              .got = tensor.grad().defined() ? "another tensor" : "None, as after module.zero_grad()",
              .hint = "engine.zero_grad() forgets the gradients, on all ranks; after step() nothing has to be done"});
  }
}

void GradientGuards::clear() {
  if (guarded_.empty()) return;
  guarded_.clear();
  for (const int param : trainable_) slots_.tensor(param).mutable_grad().reset();
}

}  // namespace zeroth::libtorch
