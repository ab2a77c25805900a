// Adam and AdamW differ in where weight decay enters; both keep two moments.
#include "optim/adam_step.h"
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
    zeroth::kernels::AdamWHyper hyper = adam_hyper(block);
    hyper.decoupled = decoupled_;
    adam_step(block, hyper, kernels, stream);
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
