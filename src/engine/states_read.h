// What a load has read, before anything is changed.
#pragma once

#include "checkpoint/element_reader.h"
#include "engine/early_update.h"
#include "engine/load_hypers.h"
#include "engine/state_pieces.h"

#include <zeroth/engine/engine.h>
#include <zeroth/optim/loss_scaler.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// The files of a checkpoint, and of the one that it refers to, by what they have.
struct Engine::StateSources {
  std::vector<detail::KnownFile> files{};
  std::map<std::string, std::vector<detail::Source>> by_key{};
};

struct Engine::StatesRead {
  std::vector<StatePiece> pieces{};
  std::vector<std::span<std::byte>> values{};  ///< one a piece
  Arena memory{};                              ///< of the values, where the engine has none to lend
  std::vector<GroupPair> pairs{};              ///< of this rank's parameters
  std::vector<GroupHyper> groups{};
  std::vector<std::string> update_groups{};  ///< of a delayed update, as Manifest::groups
  std::optional<LossScaler::State> scaler{};
  std::vector<std::int64_t> updates{};  ///< one a parameter; -1: not there
  EarlyUpdate early{};
  std::optional<FreezeState> freeze{};
  std::vector<bool> held{};  ///< one a parameter: it has a gradient whose update is delayed

  // Of a step that was under way.
  struct Sums {
    std::size_t group = 0;
    int flat = 0;
    std::vector<std::byte> values{};  ///< of ModelMemory::micro_step_part()
  };
  struct Gradient {
    std::size_t group = 0;
    int param = 0;
    std::vector<std::byte> values{};
  };
  int micro_step = 0;
  std::vector<bool> has_grad{};  ///< one a parameter
  std::vector<Sums> sums{};
  std::vector<Gradient> gradients{};  ///< of this rank
};

}  // namespace zeroth
