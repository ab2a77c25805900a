// UnitUses: which leases an engine holds on its units and why, and which gradients of them are still to come.
#pragma once

#include <zeroth/zero/parameter_store.h>
#include <zeroth/zero/plan.h>

#include <cstddef>
#include <vector>

namespace zeroth {

class UnitUses {
 public:
  /// All of them outlive this.
  UnitUses(const ModelLayout& model, const ShardingPlan& plan, ParameterStore& parameters);

  // The events of a front end: see Engine.
  void pre_forward(int unit);
  void post_forward(int unit, bool awaits_backward);
  void drop_forward(int unit) noexcept;
  void pre_backward(int unit);
  void post_backward(int unit);
  void end_backward();

  /// See Engine::keep_gathered().
  void keep(int unit);
  void give_back(int unit) noexcept;
  [[nodiscard]] bool holds(int unit) const;

  /// What is kept from forward to backward.
  void release_kept();
  void release_all();

  /// The parameter's gradient has come.
  void count_gradient(int param);
  /// See Engine::expect_gradient().
  void expect_gradient(int param, bool expected);
  /// One a parameter: backwards bring its gradient.
  [[nodiscard]] const std::vector<bool>& expected() const { return expected_; }
  [[nodiscard]] bool gradients_complete(int unit) const;

 private:
  /// Of one unit: leases, by why they are held, and gradients.
  struct Use {
    std::vector<UnshardLease> forward;  ///< one a running forward
    UnshardLease kept;                  ///< from forward to backward
    UnshardLease backward;
    UnshardLease asked;  ///< by the front end, for a whole step
    int num_asked = 0;
    int trainable = 0;       ///< trainable parameters
    int arrived = 0;         ///< of them, with a gradient in this backward
    std::vector<bool> seen;  ///< one a parameter of the unit's spec
  };
  [[nodiscard]] Use& of(int unit) { return uses_[static_cast<std::size_t>(unit)]; }
  [[nodiscard]] const Use& of(int unit) const { return uses_[static_cast<std::size_t>(unit)]; }
  [[nodiscard]] int unit_of(int param) const { return model_.places[static_cast<std::size_t>(param)].unit; }
  [[nodiscard]] std::size_t position_in_unit(int param) const;

  const ModelLayout& model_;
  const ShardingPlan& plan_;
  ParameterStore& parameters_;
  std::vector<Use> uses_;
  std::vector<bool> expected_;
  int kept_in_ring_ = -1;  ///< repeated unit that stays gathered in a shared slot, -1
};

}  // namespace zeroth
