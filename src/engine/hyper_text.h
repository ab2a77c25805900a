// Hyper-parameters of a group, and the state of a loss scaler, as text in a checkpoint.
#pragma once

#include <zeroth/optim/loss_scaler.h>
#include <zeroth/optim/optimizer.h>

#include <string>

namespace zeroth {

/// JSON; doubles as hexadecimal text: what is read is what was written, to the bit.
[[nodiscard]] std::string text_of(const GroupHyper& hyper);

/// `where`: the checkpoint, for errors. Throws kCheckpoint.
[[nodiscard]] GroupHyper hyper_of(const std::string& text, const std::string& where);

/// The same for a loss scaler.
[[nodiscard]] std::string text_of(const LossScaler::State& state);
[[nodiscard]] LossScaler::State scaler_state_of(const std::string& text, const std::string& where);

}  // namespace zeroth
