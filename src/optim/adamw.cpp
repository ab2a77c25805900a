// Adam and AdamW differ in where weight decay enters; both keep two moments.
#include "optim/optimizer_table.h"

#include <zeroth/optim/optimizer.h>

namespace zeroth {
namespace {

class AdamFamily final : public Optimizer {
 public:
  AdamFamily(std::string_view name, bool decoupled) : name_(name), decoupled_(decoupled) {}

  std::string_view name() const override { return name_; }
  std::vector<StateDeclaration> states() const override { return {{"exp_avg"}, {"exp_avg_sq"}}; }

  bool runs_on_device() const override { return true; }
  void step(const StepBlock& block, Kernels& kernels, const Stream& stream) const override {
    const zeroth::kernels::AdamWHyper hyper{.lr = block.hyper.lr,
                                            .beta1 = block.hyper.beta1,
                                            .beta2 = block.hyper.beta2,
                                            .eps = block.hyper.eps,
                                            .weight_decay = block.hyper.weight_decay,
                                            .decoupled = decoupled_,
                                            .factor = block.factor,
                                            .step = block.step};
    kernels.adamw({.param = block.param,
                   .low = block.low,
                   .master = block.master,
                   .exp_avg = block.states[0],
                   .exp_avg_sq = block.states[1],
                   .grad = block.grad,
                   .n = block.n,
                   .dtype = block.dtype,
                   .coefficients = zeroth::kernels::adamw_coefficients(hyper)},
                  stream);
  }

 private:
  std::string_view name_;
  bool decoupled_;
};

}  // namespace

std::unique_ptr<Optimizer> make_adamw(const OptimizerOptions& /*options*/) {
  return std::make_unique<AdamFamily>("AdamW", true);
}

std::unique_ptr<Optimizer> make_adam(const OptimizerOptions& /*options*/) {
  return std::make_unique<AdamFamily>("Adam", false);
}

}  // namespace zeroth
