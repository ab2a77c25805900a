// Hyper-parameters of a group as text in a checkpoint.
#pragma once

#include <zeroth/optim/optimizer.h>

#include <string>

namespace zeroth {

/// JSON; doubles as hexadecimal text: what is read is what was written, to the bit.
[[nodiscard]] std::string text_of(const GroupHyper& hyper);

/// `where`: the checkpoint, for errors. Throws kCheckpoint.
[[nodiscard]] GroupHyper hyper_of(const std::string& text, const std::string& where);

}  // namespace zeroth
