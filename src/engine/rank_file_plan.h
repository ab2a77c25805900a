// What one rank writes into its file of a checkpoint, in order.
#pragma once

#include "engine/state_pieces.h"

#include <zeroth/engine/engine.h>

#include <cstdint>
#include <string>
#include <vector>

namespace zeroth {

struct Engine::RankFilePlan {
  std::vector<StatePiece> pieces{};
  std::string header{};
  std::vector<ExtraTensor> extras{};  ///< of rank 0
  std::uint64_t bytes = 0;
};

}  // namespace zeroth
