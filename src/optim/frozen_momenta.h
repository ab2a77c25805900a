// What 1-bit Adam and 1-bit LAMB share: after `freeze_step` updates, or once they have settled, variances are frozen,
// and ranks exchange messages of momenta in the place of gradients.
#pragma once

#include <zeroth/optim/optimizer.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zeroth {

class FrozenMomenta : public Optimizer {
 public:
  explicit FrozenMomenta(const OptimizerOptions& options)
      : freeze_step_(options.freeze_step),
        threshold_(options.freeze_threshold),
        compression_(options.compression.compression) {}

  std::vector<StateDeclaration> states() const override {
    return {{.name = "exp_avg", .shape = StateShape::kReplica},
            {.name = "exp_avg_sq"},
            {.name = "worker_error", .shape = StateShape::kRank},
            {.name = "server_error", .shape = StateShape::kPiece}};
  }
  bool runs_on_device() const override { return true; }
  std::optional<SignMessages> messages(std::int64_t committed) const override {
    if (!is_frozen(committed)) return std::nullopt;
    return SignMessages{.state = kMomentum, .worker_error = kWorkerError, .server_error = kServerError};
  }
  bool has_messages() const override { return true; }
  std::optional<Freezing> freezing() const override {
    return Freezing{.state = "exp_avg_sq", .step = freeze_step_, .threshold = threshold_};
  }
  void freeze_at(std::int64_t step) override { freeze_step_ = step; }
  std::string lossy_part() const override {
    const std::string begin = "from step " + std::to_string(freeze_step_ + 1) + " on " +
                              (threshold_ > 0.0 ? "at the latest, and before if variances settle, " : "");
    if (compression_ == "exact") return begin + "variances are frozen";
    const std::string form =
        compression_ == "one_bit" ? "signs of momenta, one bit an element," : "momenta in the form " + compression_;
    return begin + "ranks exchange " + form + " in the place of gradients, and feed errors back";
  }
  MessageFactors message_factors(const MessageTerms& terms) const override {
    return {.momentum = terms.hyper.beta1, .grad = 1.0 - terms.hyper.beta1};
  }

 protected:
  /// States of states(); an optimizer's own come after them.
  enum : int { kMomentum, kVariance, kWorkerError, kServerError, kShared };
  [[nodiscard]] bool is_frozen(std::int64_t committed) const { return committed >= freeze_step_; }
  /// Update in which the variance of a block is as it is used.
  [[nodiscard]] std::int64_t variance_step(const StepBlock& block) const { return std::min(block.step, freeze_step_); }

 private:
  std::int64_t freeze_step_;
  double threshold_;
  std::string compression_;
};

}  // namespace zeroth
