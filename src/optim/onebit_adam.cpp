// 1-bit Adam: AdamW, until the variances are frozen; from then on ranks exchange the signs of their momenta.
//
// Ref: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML
// 2021, arXiv 2102.02888. Every rank has all momenta, because messages begin with them; variances and masters are split
// as a plan says.
#include "optim/adam_step.h"
#include "optim/frozen_momenta.h"
#include "optim/optimizer_table.h"

namespace zeroth {
namespace {

class OneBitAdam final : public FrozenMomenta {
 public:
  using FrozenMomenta::FrozenMomenta;

  std::string_view name() const override { return "OneBitAdam"; }
  void step(const StepBlock& block, Kernels& kernels, const Stream& stream) const override {
    zeroth::kernels::AdamWHyper hyper = adam_hyper(block);
    hyper.variance_step = variance_step(block);
    adam_step(block, hyper, kernels, stream);
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_onebit_adam(const OptimizerOptions& options) {
  return std::make_unique<OneBitAdam>(options);
}

}  // namespace zeroth
