// LossScaler: the factor of the loss that keeps float16 gradients away from zero and infinity. A value; no ranks.
//
// A dynamic scale falls after steps that overflowed, and doubles at a step without overflow that follows `window`
// others (or a multiple of them), as in DeepSpeed's dynamic loss scaler, step for step. Ref: Micikevicius et al.: Mixed
// Precision Training, arXiv 1710.03740, section 3.2.
#pragma once

#include <cstdint>

namespace zeroth {

/// Section "fp16" of the configuration.
struct LossScaling {
  bool enabled = false;                 ///< false: the scale is 1 for ever
  double static_scale = 0.0;            ///< above 0: the scale for ever; 0: dynamic
  int initial_power = 16;               ///< the first dynamic scale is 2 to this power
  std::int64_t window = 1000;           ///< steps without overflow until the scale doubles
  int hysteresis = 2;                   ///< overflows until it halves
  bool consecutive_hysteresis = false;  ///< a step without overflow restores the hysteresis; false: only growth does
  double min_scale = 1.0;               ///< below this it does not fall

  [[nodiscard]] bool is_dynamic() const { return enabled && static_scale == 0.0; }
  bool operator==(const LossScaling&) const = default;
};

class LossScaler {
 public:
  explicit LossScaler(const LossScaling& scaling);

  /// Of the gradients of the next step.
  [[nodiscard]] double scale() const { return state_.scale; }
  /// Ends a step. Returns false if it overflowed at the smallest scale: nothing is left to try. A static scale stays.
  [[nodiscard]] bool update(bool overflowed);

  /// All that a resumed run needs.
  struct State {
    double scale = 1.0;
    std::int64_t steps = 0;           ///< calls of update()
    std::int64_t last_overflow = -1;  ///< the call that was told of the last overflow, from 0
    int hysteresis = 1;               ///< overflows left until the scale halves
    bool operator==(const State&) const = default;
  };
  [[nodiscard]] const State& state() const { return state_; }
  /// A static scale, and a scaler that is off, keep their scale. Values that cannot be are brought into their range.
  void set_state(const State& state);

 private:
  LossScaling scaling_;
  State state_;
};

}  // namespace zeroth
