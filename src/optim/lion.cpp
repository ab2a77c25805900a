// Lion: the sign of an interpolated momentum. One state, half of Adam's.
#include "optim/optimizer_table.h"

#include <zeroth/optim/optimizer.h>

namespace zeroth {
namespace {

class Lion final : public Optimizer {
 public:
  std::string_view name() const override { return "Lion"; }
  std::vector<StateDeclaration> states() const override { return {{"exp_avg"}}; }

  bool runs_on_device() const override { return true; }
  void step(const StepBlock& block, Kernels& kernels, const Stream& stream) const override {
    kernels.lion({.param = block.param,
                  .low = block.low,
                  .master = block.master,
                  .exp_avg = block.states[0],
                  .grad = block.grad,
                  .n = block.n,
                  .dtype = block.dtype,
                  .hyper = {.lr = block.hyper.lr,
                            .beta1 = block.hyper.beta1,
                            .beta2 = block.hyper.beta2,
                            .weight_decay = block.hyper.weight_decay,
                            .factor = block.factor}},
                 stream);
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_lion(const OptimizerOptions& /*options*/) {
  return std::make_unique<Lion>();
}

}  // namespace zeroth
