#include "optim/optimizer_table.h"

#include <zeroth/optim/optimizer.h>

namespace zeroth {
namespace {

class Sgd final : public Optimizer {
 public:
  explicit Sgd(bool momentum) : momentum_(momentum) {}

  std::string_view name() const override { return "SGD"; }
  std::vector<StateDeclaration> states() const override {
    return momentum_ ? std::vector<StateDeclaration>{{"momentum_buffer"}} : std::vector<StateDeclaration>{};
  }

  bool runs_on_device() const override { return true; }
  void step(const StepBlock& block, Kernels& kernels, const Stream& stream) const override {
    kernels.sgd({.param = block.param,
                 .low = block.low,
                 .master = block.master,
                 .momentum = momentum_ ? block.states[0] : nullptr,  // untouched where the group's is 0
                 .grad = block.grad,
                 .n = block.n,
                 .dtype = block.dtype,
                 .hyper = {.lr = block.hyper.lr,
                           .momentum = momentum_ ? block.hyper.momentum : 0.0,
                           .dampening = block.hyper.dampening,
                           .weight_decay = block.hyper.weight_decay,
                           .nesterov = block.hyper.nesterov,
                           .factor = block.factor,
                           .first_step = block.step == 1}},
                stream);
  }

 private:
  bool momentum_;
};

}  // namespace

std::unique_ptr<Optimizer> make_sgd(const OptimizerOptions& options) {
  return std::make_unique<Sgd>(options.momentum);
}

}  // namespace zeroth
