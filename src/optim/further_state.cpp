#include "optim/further_state.h"

#include <zeroth/base/error.h>

#include <algorithm>
#include <utility>

namespace zeroth {
namespace {

class WithFurtherState final : public Optimizer {
 public:
  WithFurtherState(std::unique_ptr<Optimizer> inner, StateDeclaration state)
      : inner_(std::move(inner)), state_(std::move(state)) {
    const std::vector<StateDeclaration> own = inner_->states();
    ZR_CHECK(std::ranges::find(own, state_.name, &StateDeclaration::name) == own.end(), ErrorCode::kUsage,
             "an optimizer declares two states of one name",
             {.where = "optim", .which = std::string(name()), .got = state_.name});
  }

  std::string_view name() const override { return inner_->name(); }
  std::vector<StateDeclaration> states() const override {
    std::vector<StateDeclaration> all = inner_->states();
    all.push_back(state_);
    return all;
  }
  bool runs_on_device() const override { return inner_->runs_on_device(); }
  std::optional<SignMessages> messages(std::int64_t committed) const override { return inner_->messages(committed); }
  bool has_messages() const override { return inner_->has_messages(); }
  std::string lossy_part() const override { return inner_->lossy_part(); }
  MessageFactors message_factors(const MessageTerms& terms) const override { return inner_->message_factors(terms); }
  std::optional<Freezing> freezing() const override { return inner_->freezing(); }
  void freeze_at(std::int64_t step) override { inner_->freeze_at(step); }
  bool has_local_steps() const override { return inner_->has_local_steps(); }
  double rate(const GroupHyper& hyper, std::int64_t step) const override { return inner_->rate(hyper, step); }
  std::vector<TensorFact> facts(std::int64_t committed) const override { return inner_->facts(committed); }
  bool has_facts() const override { return inner_->has_facts(); }
  void measure(const StepBlock& block, std::span<double* const> measures, Kernels& kernels,
               const Stream& stream) const override {
    inner_->measure(of_inner(block), measures, kernels, stream);
  }
  double conclude(const TensorUpdate& tensor) const override {
    TensorUpdate own = tensor;
    own.states = tensor.states.first(tensor.states.size() - 1);
    return inner_->conclude(own);
  }
  void step(const StepBlock& block, Kernels& kernels, const Stream& stream) const override {
    inner_->step(of_inner(block), kernels, stream);
  }

 private:
  static StepBlock of_inner(StepBlock block) {
    block.states = block.states.first(block.states.size() - 1);
    return block;
  }

  std::unique_ptr<Optimizer> inner_;
  StateDeclaration state_;
};

}  // namespace

std::unique_ptr<Optimizer> with_further_state(std::unique_ptr<Optimizer> inner, StateDeclaration state) {
  return std::make_unique<WithFurtherState>(std::move(inner), std::move(state));
}

}  // namespace zeroth
