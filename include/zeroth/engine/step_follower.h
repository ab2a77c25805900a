// StepFollower: what goes on beside the steps of an engine and changes its weights between them, as local updates do
// (local_updates.h). An engine has one at most.
#pragma once

#include <zeroth/engine/step_result.h>

#include <cstdint>
#include <string>

namespace zeroth {

class StepFollower {
 public:
  StepFollower() = default;
  StepFollower(const StepFollower&) = delete;
  StepFollower& operator=(const StepFollower&) = delete;
  virtual ~StepFollower() = default;

  /// At the end of a step that was committed, on all ranks of the engine. Sets `result.changed` if it has changed
  /// weights. May block.
  virtual void after_step(StepResult& result) = 0;
  /// Before states are saved or loaded, on all ranks of the engine: nothing is under way any more. May block.
  virtual void settle() = 0;
  /// What a checkpoint keeps beside the states, as JSON.
  [[nodiscard]] virtual std::string saved() const = 0;
  /// Throws kCheckpoint if a checkpoint with this text cannot be gone on from; "": it is of an engine without follower.
  /// `where`: the checkpoint.
  virtual void require_usable(const std::string& saved, bool strict, const std::string& where) const = 0;
  /// The engine has the weights and states of a checkpoint. "": begins anew from these weights. May block.
  virtual void restore(const std::string& saved) = 0;
  /// Bytes that it holds beside the engine's states, as MemoryState::kStaging.
  [[nodiscard]] virtual std::uint64_t held_bytes() const = 0;
};

}  // namespace zeroth
