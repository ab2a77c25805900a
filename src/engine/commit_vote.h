// The commit vote, from which every rank takes the same decision: one small integer all_reduce a step over all ranks of
// the job, and before it one over each shard group that does not have all of them.
#pragma once

#include "zero/gradient_store.h"

#include <kernels/norm/norm.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/engine/step_result.h>
#include <zeroth/optim/optimizer.h>
#include <zeroth/shard/param_spec.h>

#include <cstdint>
#include <span>
#include <vector>

namespace zeroth {

/// What one rank says.
struct Ballot {
  std::int64_t groups = 0;          ///< digest of the hyper-parameters that this rank would update with
  kernels::NormAccumulator norm{};  ///< over this rank's reduced shards
  std::vector<bool> has_grad{};     ///< one a parameter that all ranks have: a gradient arrived on this rank
  Offender offender{};
  bool failed = false;         ///< a backward threw on this rank
  bool idle = false;           ///< no backward ran on this rank since its last step()
  std::int64_t backwards = 0;  ///< of this rank since its last step()
  bool preempted = false;      ///< this rank was asked to make room
  StepTimes times{};           ///< of this rank, since the last time
  int joined = 0;              ///< micro-steps in which this rank had no batch, but of the first rank of a batch only
  bool out = false;            ///< this rank had no batch in some micro-step
  bool discards = false;       ///< this rank wants no update, but the step's gradients forgotten
  bool save_ended = false;     ///< rank 0: the save that runs behind has ended
  bool save_failed = false;    ///< and failed
  bool updated = false;        ///< this rank has begun the update that the vote is about
  std::vector<std::int64_t> trains{0};  ///< one a shard group: digest of its parameters that want a gradient here
  std::vector<std::int64_t> writes{0};  ///< one a shard group: digest of what the caller wrote to its parameters
};

/// The ranks of a shard group and of those beside it: one number a rank of the job, equal where ranks are in one group.
using GroupColors = std::vector<int>;

/// What all ranks agree on.
struct CommitVote {
  kernels::NormAccumulator norm{};
  std::vector<bool> has_grad{};  ///< by any rank
  Offender offender{};
  int offender_rank = -1;
  int failed_rank = -1;
  int idle_rank = -1;
  int usual_groups_rank = 0;              ///< first of the ranks whose hyper-parameters most ranks have
  int other_groups_rank = -1;             ///< first rank whose hyper-parameters differ from those
  int preempted_rank = -1;                ///< first rank that was asked to make room
  int uneven_rank = -1;                   ///< first rank that ran more or fewer backwards than rank 0
  std::int64_t joined = 0;                ///< of all ranks
  std::vector<std::int64_t> backwards{};  ///< by rank
  std::vector<StepTimes> times{};         ///< by rank
  int discarding_rank = -1;               ///< first rank that discards
  int keeping_rank = -1;                  ///< first rank that does not
  int updated_rank = -1;                  ///< first rank that has begun the update
  bool save_ended = false;                ///< as rank 0 says
  bool save_failed = false;
  int usual_trains_rank = 0;   ///< first of the ranks that train what most ranks of a shard group train
  int other_trains_rank = -1;  ///< first rank of it that trains other parameters; not of those that had no batch
  int other_trains_group = 0;  ///< which shard group
  int usual_writes_rank = 0;   ///< the same of what callers wrote to parameters
  int other_writes_rank = -1;
  int other_writes_group = 0;

  /// Some rank did not come for an update, or for another one: there is none, and the step's gradients are to be
  /// forgotten.
  [[nodiscard]] bool refused() const {
    return discarding_rank >= 0 || idle_rank >= 0 || other_groups_rank >= 0 || other_trains_rank >= 0 ||
           other_writes_rank >= 0;
  }
  /// The shard group that the refusal is about.
  [[nodiscard]] int refused_group() const { return other_trains_rank >= 0 ? other_trains_group : other_writes_group; }
  [[nodiscard]] bool finite() const { return offender_rank < 0 && norm.nonfinite_blocks() == 0; }
};

/// Blocking. True for each parameter of a shard group that has a gradient on any of its ranks.
[[nodiscard]] std::vector<bool> on_any_rank(const std::vector<bool>& has_grad, const Communicator& group);

/// Blocking. The message: words of the norm, parameters with a gradient (four 16-bit counts a word), thirteen words a
/// rank and two more for each shard group after the first. `groups`: one for each of Ballot::trains; empty: all ranks
/// are one group.
[[nodiscard]] CommitVote take_commit_vote(const Ballot& ballot, const Communicator& communicator,
                                          std::span<const GroupColors> groups = {});

/// Blocking. For ranks that know that `odd` would update with other hyper-parameters than `usual`: throws kMismatch
/// with both values.
[[noreturn]] void throw_other_groups(const std::vector<GroupHyper>& groups, int usual, int odd,
                                     const Communicator& communicator);

/// What of this rank others may have otherwise, in the shard group of CommitVote::refused_group().
struct OwnTerms {
  const std::vector<GroupHyper>& groups;
  const std::vector<ParamSpec>& params;
  const std::vector<bool>& trains;          ///< one a parameter: it wants a gradient
  const std::vector<std::int64_t>& writes;  ///< one a parameter: digest of what the caller wrote to it; 0: nothing
  const GroupColors& colors;
  const Communicator& communicator;  ///< of the shard group
  int rank = 0;                      ///< of the job
};

/// Digest for Ballot::writes; 0: nothing was written.
[[nodiscard]] std::int64_t digest_of(const std::vector<std::int64_t>& writes);

/// The rank whose digest differs from the others' in the first shard group where one does, as the ranks of the job.
struct OtherWrites {
  int usual = 0;
  int odd = -1;
  int group = 0;
};
/// Blocking. `digests`: one a shard group. `groups`: as for take_commit_vote().
[[nodiscard]] OtherWrites compare_writes(const std::vector<std::int64_t>& digests, const Communicator& communicator,
                                         std::span<const GroupColors> groups);
/// Blocking. kMismatch: callers wrote different values to parameters.
[[noreturn]] void throw_other_writes(const OtherWrites& found, const OwnTerms& own, int world);

/// Digest for Ballot::trains.
[[nodiscard]] std::int64_t digest_of(const std::vector<bool>& trains);

/// Blocking. Throws what refused() is about.
void throw_if_refused(const CommitVote& vote, const OwnTerms& own, const Communicator& communicator);

/// kUsage: this rank has called step() without a backward.
[[noreturn]] void throw_idle(int idle_rank, int world);

/// kMismatch: some ranks discard the step's gradients, others want an update.
[[noreturn]] void throw_not_all_discard(const CommitVote& vote, int world);

}  // namespace zeroth
