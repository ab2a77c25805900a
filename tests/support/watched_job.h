// A rank of a job as programs run it: World, control plane, an engine with the toy model, sums of the program's own
// beside it, and places where whatever shall go wrong can happen.
#pragma once

#include "support/toy_model.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/engine/world.h>

#include <cstdint>
#include <functional>
#include <string>

namespace zeroth::test {

/// Where in a step the program is.
enum class Moment : std::uint8_t {
  kBegin,     ///< nothing of the step has been done
  kForward,   ///< inside the forward of a unit, whose parameters are there
  kBackward,  ///< inside its backward
  kTrained,   ///< between backward and step()
  kStepped,   ///< after step()
  kSummed,    ///< after the program's own sums
};

/// What a rank does in one step; all of it if nobody says otherwise.
struct Turn {
  bool backward = true;
  bool step = true;
  bool loss = true;     ///< sums four floats over ranks: "the loss metrics"
  bool counts = true;   ///< and kManyCounts floats: "the token counts"
  bool leaves = false;  ///< ends the training in order, before anything else
};

/// What a happening can lay its hands on.
struct RankHere {
  const World& world;
  Engine& engine;
  ToyModel& model;
  Communicator& own;      ///< the program's own group, "world/engine1"
  OperationId exports{};  ///< "an export", the program's own call of all ranks
  int step = 0;           ///< from 0
  Turn turn{};
};

/// `unit` is of Moment::kForward and kBackward, else -1.
using Happening = std::function<void(RankHere& here, Moment moment, int unit)>;

inline constexpr int kManyCounts = 20'000;
inline constexpr std::uint32_t kLossTag = 1;
inline constexpr std::uint32_t kCountsTag = 2;
/// The sums that a turn makes; `count` floats of them.
void sum_loss(const Communicator& own, int count = 4);
void sum_counts(const Communicator& own, int count = kManyCounts);

struct WatchedJob {
  int world = 4;
  int zero_stage = 3;
  int steps = 6;
  double lr = 0.02;
  int max_nonfinite_steps = 10;
  ToyOptions model{.inputs = 5, .width = 12, .blocks = 3};
  CommOptions options{};
  SkipRule skip{};                ///< blocks that a rank leaves out
  ToyModel::PoisonRule poison{};  ///< gradients that become NaN
  /// Changes what one rank asks for.
  std::function<void(int rank, ToyOptions&, EngineSettings&)> tamper{};
  Happening happen{};
};

/// Runs one rank to its end, in order or with an error. It tells the others of its error, as programs do, and rethrows
/// it.
void run_watched_rank(const WatchedJob& job, const World& world);

/// World of a rank that is a process and meets the others in the shared memory of a job with this name.
[[nodiscard]] World shared_memory_world(const std::string& name, int rank, int size);

}  // namespace zeroth::test
