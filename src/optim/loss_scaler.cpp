#include <zeroth/optim/loss_scaler.h>

#include <algorithm>
#include <cmath>

namespace zeroth {

LossScaler::LossScaler(const LossScaling& scaling) : scaling_(scaling) {
  state_.hysteresis = scaling.hysteresis;
  if (!scaling.enabled) return;
  state_.scale = scaling.is_dynamic() ? std::ldexp(1.0, scaling.initial_power) : scaling.static_scale;
}

bool LossScaler::update(bool overflowed) {
  if (!scaling_.is_dynamic()) return true;
  bool can_go_on = true;
  if (overflowed) {
    if (state_.hysteresis > 1) {
      --state_.hysteresis;
    } else {
      can_go_on = state_.scale > scaling_.min_scale;
      state_.scale = std::max(state_.scale / 2, scaling_.min_scale);
    }
    state_.last_overflow = state_.steps;
  } else {
    const std::int64_t clean = state_.steps - state_.last_overflow - 1;  // steps before this one
    const bool grows = clean > 0 && clean % scaling_.window == 0;
    if (grows || scaling_.consecutive_hysteresis) state_.hysteresis = scaling_.hysteresis;
    if (grows) state_.scale *= 2;
  }
  ++state_.steps;
  return can_go_on;
}

void LossScaler::set_state(const State& state) {
  if (!scaling_.is_dynamic()) return;
  state_ = state;
  if (!(state_.scale >= scaling_.min_scale) || !std::isfinite(state_.scale)) state_.scale = scaling_.min_scale;
  state_.hysteresis = std::clamp(state.hysteresis, 1, std::max(scaling_.hysteresis, 1));
  state_.steps = std::max<std::int64_t>(state.steps, 0);
  state_.last_overflow = std::clamp<std::int64_t>(state.last_overflow, -1, state_.steps);
}

}  // namespace zeroth
