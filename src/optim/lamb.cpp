// LAMB: Adam's direction, as long as the parameter itself. The whole tensor is measured before any of it moves.
#include "optim/lamb_step.h"
#include "optim/optimizer_table.h"

#include <zeroth/optim/optimizer.h>

namespace zeroth {
namespace {

class Lamb final : public Optimizer {
 public:
  explicit Lamb(const LambOptions& options) : options_(options) {}

  std::string_view name() const override { return "Lamb"; }
  std::vector<StateDeclaration> states() const override { return {{"exp_avg"}, {"exp_avg_sq"}}; }
  bool runs_on_device() const override { return true; }

  std::vector<TensorFact> facts(std::int64_t /*committed*/) const override {
    return {TensorFact::kNorm, TensorFact::kNorm};
  }
  bool has_facts() const override { return true; }
  void measure(const StepBlock& block, std::span<double* const> measures, Kernels& kernels,
               const Stream& stream) const override {
    zeroth::kernels::LambArgs args = lamb_args(block, options_);
    args.param_squares = measures[0];
    args.update_measure = measures[1];
    kernels.lamb_measure(args, stream);
  }
  double conclude(const TensorUpdate& tensor) const override { return trust_ratio(tensor.facts, options_); }
  void step(const StepBlock& block, Kernels& kernels, const Stream& stream) const override {
    kernels.lamb_apply(lamb_args(block, options_), stream);
  }

 private:
  LambOptions options_;
};

}  // namespace

std::unique_ptr<Optimizer> make_lamb(const OptimizerOptions& options) {
  return std::make_unique<Lamb>(options.lamb);
}

}  // namespace zeroth
