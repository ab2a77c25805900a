// EarlyUpdate: an update that begins inside a backward, before the vote of the running step.
//
//                     inside_backward                       delayed_after
//   gradients of      the running step                      the step before
//   terms             of the running step, known before     of the vote of the step before
//   a skipped step    ends the training once it has begun   costs nothing: that step was committed
//
// A unit is updated when its gradients of the last micro-step have come on all ranks: no rank needs its parameters then
// (GradientStore::are_final()). What no backward has updated is updated after the vote.
#pragma once

#include "engine/freeze_watch.h"
#include "engine/updater.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zeroth {

struct CommitVote;
struct EngineSettings;
struct StepResult;

struct EarlyUpdate {
  std::optional<UpdateTerms> terms{};  ///< of the running step; or, while `is_delayed`, of the step before
  bool is_delayed = false;             ///< gradients of the step before wait in memory of their own
  bool begun = false;                  ///< this rank has updated a unit since the last vote
  bool has_absent = false;             ///< a rank had no batch in a micro-step of this step
  bool is_torn = false;                ///< some units have an update, and others have not
  std::string torn_by{};               ///< the first cause, if an error was; "": the vote
  std::optional<double> last_norm{};   ///< of the last committed step
};

/// Throws kConfig for an update that cannot begin when the settings want it to.
/// `host_updates`: no device updates states of its own.
void require_possible(const EngineSettings& settings, bool host_updates);

/// Factor of clipping to a norm of `clipping`; 1 for 0.
[[nodiscard]] double clip_coefficient(double clipping, double norm);

/// The terms of the running step, if they are known before its vote. `batches`: of all ranks, if none is absent.
[[nodiscard]] std::optional<UpdateTerms> terms_before_vote(const EngineSettings& settings, const EarlyUpdate& early,
                                                           std::int64_t batches, double loss_scale,
                                                           std::int64_t committed);

/// What a checkpoint keeps of it, as JSON, doubles as hexadecimal text; "" if nothing. Held gradients are states.
/// `freeze`: of an optimizer that freezes its variances.
[[nodiscard]] std::string text_of(const EarlyUpdate& early, const std::optional<FreezeState>& freeze = std::nullopt);
/// `where`: the checkpoint, for errors. Throws kCheckpoint. `groups`: as text_of(GroupHyper), in the order of there.
struct SavedUpdate {
  std::optional<double> last_norm{};
  bool is_delayed = false;
  double factor = 1.0;
  double lr_factor = 1.0;
  std::vector<std::string> groups{};
  std::optional<FreezeState> freeze{};
};
[[nodiscard]] SavedUpdate saved_update_of(const std::string& text, const std::string& where);

/// Throws if the vote does not commit a step of which some rank has updated units: the weights are torn.
void require_committed(const CommitVote& vote, const StepResult& result);

}  // namespace zeroth
