// 0/1 Adam: variances change ever more rarely, and in the steps between them ranks exchange signs.
//
// Ref: Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", ICLR 2023, arXiv
// 2202.06009. Until var_freeze_step ranks sum their gradients where variances change, and exchange the signs of their
// gradients elsewhere. After it variances are frozen, and ranks exchange the signs of their momenta.
#include "optim/adam_step.h"
#include "optim/optimizer_table.h"
#include "optim/zero_one_schedule.h"

#include <zeroth/optim/optimizer.h>

#include <algorithm>
#include <string>

namespace zeroth {
namespace {

class ZeroOneAdam final : public Optimizer {
 public:
  explicit ZeroOneAdam(const ZeroOneOptions& options) : options_(options) {}

  std::string_view name() const override { return "ZeroOneAdam"; }
  std::vector<StateDeclaration> states() const override {
    std::vector<StateDeclaration> states{{.name = "exp_avg", .shape = StateShape::kReplica},
                                         {.name = "exp_avg_sq"},
                                         {.name = "exchanged_grad", .shape = StateShape::kReplica},
                                         {.name = "worker_error", .shape = StateShape::kRank},
                                         {.name = "server_error", .shape = StateShape::kPiece}};
    if (has_local_steps()) {
      states.push_back({.name = "unsent_steps", .shape = StateShape::kRank});
      states.push_back({.name = "synchronised"});
    }
    return states;
  }
  bool runs_on_device() const override { return true; }

  std::optional<SignMessages> messages(std::int64_t committed) const override {
    if (!is_frozen(committed)) {
      if (updates_variance(options_, committed + 1)) return std::nullopt;
      return SignMessages{
          .state = kExchanged, .worker_error = kWorkerError, .server_error = kServerError, .reads_state = false};
    }
    return SignMessages{.state = kMomentum,
                        .worker_error = kWorkerError,
                        .server_error = kServerError,
                        .sum = has_local_steps() ? kUnsent : -1,
                        .begins = committed == options_.var_freeze_step,
                        .exchanges = synchronises(options_, committed + 1)};
  }
  bool has_messages() const override { return true; }
  std::string lossy_part() const override {
    return "after step " + std::to_string(std::min(options_.var_update_scaler, options_.var_freeze_step)) +
           " ranks exchange signs of gradients or momenta, one bit an element, in some steps or all" +
           (has_local_steps() ? ", and take steps of their own between" : "");
  }
  bool has_local_steps() const override { return options_.local_step_clipper > 1; }
  MessageFactors message_factors(const MessageTerms& terms) const override {
    if (!is_frozen(terms.committed)) return {.momentum = 0.0, .grad = 1.0};
    // The mean of the momenta of all steps since the last exchange, each as far as its step went.
    const double own = terms.rates > 0.0 ? rate(terms.hyper, terms.step) / terms.rates : 1.0;
    return {.momentum = own * terms.hyper.beta1,
            .grad = own * (1.0 - terms.hyper.beta1),
            .sum = terms.rates > 0.0 ? 1.0 / terms.rates : 0.0};
  }
  double rate(const GroupHyper& hyper, std::int64_t step) const override {
    return zeroth::kernels::adamw_coefficients({.lr = hyper.lr, .beta1 = hyper.beta1, .step = step}).step_size;
  }

  void step(const StepBlock& block, Kernels& kernels, const Stream& stream) const override {
    zeroth::kernels::AdamWHyper hyper = adam_hyper(block);
    hyper.variance_step = variance_updates(options_, std::min(block.step, options_.var_freeze_step));
    const zeroth::kernels::AdamWCoefficients coefficients = zeroth::kernels::adamw_coefficients(hyper);
    if (!is_frozen(block.committed)) {
      // In two calls: an element without a variance may have a momentum, of signs, and must not move by it.
      if (block.from_messages) {
        take_gradient(block, block.states[kExchanged], 1.0, kernels, stream);
      } else {
        zeroth::kernels::AdamWCoefficients moments = coefficients;
        moments.step_size = 0.0;
        moments.decay = 1.0;
        adam_step(block, moments, kernels, stream);
      }
      StepBlock moves = block;
      moves.grad = nullptr;
      return adam_step(moves, coefficients, kernels, stream);
    }
    if (block.grad != nullptr) return step_alone(block, coefficients, kernels, stream);
    if (block.local_steps == 0) return adam_step(block, coefficients, kernels, stream);
    // All steps since ranks had the same parameters, from these, with the mean of all ranks' momenta.
    zeroth::kernels::AdamWCoefficients all = coefficients;
    all.step_size = block.scale;
    adam_step(at_synchronised(block), all, kernels, stream);
    copy_synchronised(block, kernels, /*to_param=*/true);
  }

 private:
  enum : int { kMomentum, kVariance, kExchanged, kWorkerError, kServerError, kUnsent, kSynchronised };

  [[nodiscard]] bool is_frozen(std::int64_t committed) const { return committed >= options_.var_freeze_step; }

  /// The momentum alone takes a gradient: with this beta2 the variance stays, and with these steps the parameter.
  static void take_gradient(const StepBlock& block, const std::byte* grad, double factor, Kernels& kernels,
                            const Stream& stream) {
    StepBlock with_grad = block;
    with_grad.grad = grad;
    zeroth::kernels::AdamWHyper hyper = adam_hyper(block);
    hyper.lr = 0.0;
    hyper.factor = factor;
    zeroth::kernels::AdamWCoefficients still = zeroth::kernels::adamw_coefficients(hyper);
    still.beta2 = 1.0;
    still.one_minus_beta2 = 0.0;
    adam_step(with_grad, still, kernels, stream);
  }

  /// With this rank's own gradients; what it does is added to what it will tell the others.
  static void step_alone(const StepBlock& block, const zeroth::kernels::AdamWCoefficients& coefficients,
                         Kernels& kernels, const Stream& stream) {
    if (block.local_steps == 0) copy_synchronised(block, kernels, /*to_param=*/false);
    take_gradient(block, block.grad, block.factor, kernels, stream);
    kernels.sign_message({.error = block.states[kUnsent],
                          .momentum = block.states[kMomentum],
                          .grad = block.grad,
                          .grad_dtype = block.dtype,
                          .n = block.n,
                          .dtype = block.dtype,
                          .momentum_factor = coefficients.step_size,
                          .grad_factor = 0.0},
                         stream);
    if (coefficients.decay != 1.0) {
      zeroth::kernels::AdamWCoefficients decay = coefficients;
      decay.step_size = 0.0;
      adam_step(at_synchronised(block), decay, kernels, stream);
    }
    StepBlock frozen = block;
    frozen.grad = nullptr;
    adam_step(frozen, coefficients, kernels, stream);
  }

  /// The parameters that all ranks had when they last synchronised, in the place of this rank's.
  [[nodiscard]] static StepBlock at_synchronised(const StepBlock& block) {
    StepBlock there = block;
    there.param = block.states[kSynchronised];
    there.low = nullptr;
    there.master = nullptr;
    there.grad = nullptr;
    return there;
  }
  static void copy_synchronised(const StepBlock& block, Kernels& kernels, bool to_param) {
    (void)kernels.host("local steps of ZeroOneAdam");
    const auto copy = [&]<class T>(T* there) {
      for (std::int64_t i = 0; i < block.n; ++i) {
        if (to_param) {
          block.set_value(i, there[i]);
        } else {
          there[i] = block.value<T>(i);
        }
      }
    };
    if (block.dtype == DType::kFloat64) return copy(reinterpret_cast<double*>(block.states[kSynchronised]));
    copy(reinterpret_cast<float*>(block.states[kSynchronised]));
  }

  ZeroOneOptions options_;
};

}  // namespace

std::unique_ptr<Optimizer> make_zero_one_adam(const OptimizerOptions& options) {
  return std::make_unique<ZeroOneAdam>(options.zero_one);
}

}  // namespace zeroth
