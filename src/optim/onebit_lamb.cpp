// 1-bit LAMB: LAMB, until the variances are frozen; from then on ranks exchange the signs of their momenta.
//
// Ref: Li et al., "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence Speed",
// HiPC 2022, arXiv 2104.06069. The trust ratio of a parameter is then the mean of those before, times a factor that
// says how far its variance would have gone on. Each parameter has a scale of its own in the messages, so the paper's
// coefficients, which fit all momenta to one scale, have nothing to do.
#include "optim/frozen_momenta.h"
#include "optim/lamb_step.h"
#include "optim/optimizer_table.h"

#include <algorithm>

namespace zeroth {
namespace {

class OneBitLamb final : public FrozenMomenta {
 public:
  explicit OneBitLamb(const OptimizerOptions& options) : FrozenMomenta(options), options_(options.lamb) {}

  std::string_view name() const override { return "OneBitLamb"; }
  std::vector<StateDeclaration> states() const override {
    std::vector<StateDeclaration> all = FrozenMomenta::states();
    all.push_back({.name = "exp_avg_last"});
    all.push_back({.name = "exp_avg_sq_fresh"});
    all.push_back({.name = "lamb_coeff_freeze", .shape = StateShape::kTensor, .dtype = DType::kFloat64});
    all.push_back({.name = "last_factor", .shape = StateShape::kTensor, .dtype = DType::kFloat64, .initial = 1.0});
    return all;
  }

  std::vector<TensorFact> facts(std::int64_t committed) const override {
    if (!is_frozen(committed)) return {TensorFact::kNorm, TensorFact::kNorm};
    return {TensorFact::kGreatest};
  }
  bool has_facts() const override { return true; }
  void measure(const StepBlock& block, std::span<double* const> measures, Kernels& kernels,
               const Stream& stream) const override {
    zeroth::kernels::LambArgs args = args_of(block);
    args.last = block.states[kLast];
    args.fresh = block.states[kFresh];
    args.param_squares = measures.front();
    args.update_measure = measures.back();
    kernels.lamb_measure(args, stream);
  }
  double conclude(const TensorUpdate& tensor) const override {
    double& mean = tensor.states[kRatio];
    double& last = tensor.states[kFactor];
    if (!tensor.from_messages) {
      const double ratio = trust_ratio(tensor.facts, options_);
      mean = options_.coeff_beta * mean + (1.0 - options_.coeff_beta) * ratio;
      return ratio;
    }
    const double greatest = tensor.facts[0];
    if (greatest > 0.0) {  // 0: it has never had a gradient
      const double change = options_.factor_threshold;
      const double bounded = std::clamp(greatest, options_.factor_min, options_.factor_max);
      last = std::clamp(bounded, last * (1.0 - change), last * (1.0 + change));
    }
    return mean * last;
  }
  void step(const StepBlock& block, Kernels& kernels, const Stream& stream) const override {
    kernels.lamb_apply(args_of(block), stream);
  }

 private:
  enum : int { kLast = kShared, kFresh, kRatio, kFactor };

  [[nodiscard]] zeroth::kernels::LambArgs args_of(const StepBlock& block) const {
    return lamb_args(block, options_, variance_step(block));
  }

  LambOptions options_;
};

}  // namespace

std::unique_ptr<Optimizer> make_onebit_lamb(const OptimizerOptions& options) {
  return std::make_unique<OneBitLamb>(options);
}

}  // namespace zeroth
