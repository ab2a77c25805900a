// Texts that ranks tell each other: descriptions, outcomes.
#pragma once

#include <zeroth/comm/communicator.h>

#include <string>
#include <vector>

namespace zeroth {

/// Every rank's text, in rank order. Collective, blocks. Throws kMismatch for a text of absurd size.
[[nodiscard]] std::vector<std::string> gather_texts(const std::string& own, const Communicator& communicator);

/// The root's text. Collective, blocks. Throws as above.
[[nodiscard]] std::string broadcast_text(std::string text, int root, const Communicator& communicator);

}  // namespace zeroth
