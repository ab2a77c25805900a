// ShardGroup: the units of a model that share a plan and a group of ranks, with everything that this rank has for them.
//
// The engine has a list of them and adds nothing that one of them needs: a unit's parameters, gradients, update and
// memory are its group's affair, in the group's own numbers of parameters, units and flats. Across groups there are the
// streams, the ledger, the counters and the commit vote.
#pragma once

#include "engine/commit_vote.h"
#include "engine/message_round.h"
#include "engine/unit_uses.h"
#include "engine/updater.h"
#include "zero/gradient_store.h"
#include "zero/model_memory.h"

#include <zeroth/comm/mesh.h>
#include <zeroth/engine/engine.h>
#include <zeroth/zero/file_traffic.h>
#include <zeroth/zero/parameter_store.h>
#include <zeroth/zero/tier_plan.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// What the groups of an engine share; all of it outlives them.
struct GroupResources {
  const EngineSettings& settings;
  const Optimizer& optimizer;
  Device& device;
  Kernels& kernels;
  Kernels& host_kernels;  ///< for updates that the host makes; on ranks of a CPU the same
  Stream gather_stream;
  Stream reduce_stream;
  ParameterBinder& binder;
  ParameterStore::Counters& counters;
  StateFiles files{};
};

class ShardGroup {
 public:
  /// The ranks of a job of `world` ranks that differ along the plan's axes only. Throws kConfig if these leave out one
  /// along which ranks have batches of their own, for parameters that do not differ.
  ShardGroup(ShardGroupSpec spec, ModelPart part, const MeshPlace& place, std::span<const std::string> batch_axes,
             int world);
  ShardGroup(const ShardGroup&) = delete;
  ShardGroup& operator=(const ShardGroup&) = delete;
  ~ShardGroup();

  /// Collective over `job`, blocks: makes the group of these ranks, or takes the job's own if it `shares_job`, as one
  /// group of an engine may: the tags of two would meet there.
  void connect(const std::shared_ptr<CommBackend>& job, bool shares_job);
  /// After connect(). Collective over the group, blocks. `names`: of operations, `step` that of step().
  void allocate(const GroupResources& shared, OperationId step, const OperationNames& names);
  /// Collective, blocks; see Engine::initialize(). Returns the first unit of the whole model whose values differed, -1.
  [[nodiscard]] int initialize(const std::function<ConstTensorView(int)>& values,
                               const std::function<void(std::span<const int> params)>& release,
                               const GroupResources& shared);

  [[nodiscard]] const ShardGroupSpec& spec() const { return spec_; }
  /// Before allocate().
  void set_residency(ResidencyPlan residency) { spec_.plan.residency = std::move(residency); }
  [[nodiscard]] const ModelPart& part() const { return part_; }
  [[nodiscard]] const ModelLayout& layout() const { return part_.layout; }
  [[nodiscard]] const Communicator& communicator() const { return *communicator_; }
  /// The ranks with the same parameters: those of the group, and where others beside it have copies, these too.
  [[nodiscard]] Communicator replica_ranks() const { return alike_ ? Communicator(alike_) : *communicator_; }
  /// Of all ranks of the job.
  [[nodiscard]] const GroupColors& colors() const { return colors_; }
  [[nodiscard]] bool has_all_ranks() const { return size_ == static_cast<int>(colors_.size()); }
  /// Ranks of several stages of a pipeline sum their gradients, at the end of the step.
  [[nodiscard]] bool spans_stages() const;
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] int rank() const { return rank_; }

  [[nodiscard]] ParameterStore& parameters() { return *parameters_; }
  [[nodiscard]] GradientStore& gradients() { return *gradients_; }
  [[nodiscard]] const GradientStore& gradients() const { return *gradients_; }
  [[nodiscard]] UnitUses& uses() { return *uses_; }
  [[nodiscard]] const UnitUses& uses() const { return *uses_; }

  /// Gives back what is kept for a backward, and what was gathered ahead.
  void complete_uses();
  void end_backward();

  /// The unit's last gradients of the step have come on this rank, which needs its parameters no more.
  void end_use(int unit) {
    if (!stopped_) ended_.push_back(unit);
  }
  /// Throws kUsage if the update of the unit has begun.
  void require_usable(int unit) const;
  /// Updates, of the units that end_use() has named, those whose sums are final; with the sums of this step, or with
  /// those that hold_sums() has kept. True if there was one. Sums that are not finite end it.
  bool update_ended(const UpdateTerms& terms, bool is_delayed);
  void forget_ended();
  /// One a parameter: it wanted a gradient in the last backward.
  [[nodiscard]] const std::vector<bool>& trained() const { return trained_; }
  /// One a parameter: digest of what the caller has written to it; 0: nothing. See Engine::set_writes().
  [[nodiscard]] const std::vector<std::int64_t>& writes() const { return writes_; }
  void set_write(int param, std::int64_t digest) { writes_[static_cast<std::size_t>(param)] = digest; }
  void forget_writes() { std::ranges::fill(writes_, 0); }
  /// Before the vote: nothing of the step is under way any more. Collective, blocks.
  void complete_step();
  /// This rank's part of the norm. Elements that other ranks have too are in the part of one of them. `data_ranks`:
  /// with batches of their own, whose number is a factor of the norm where has_own_norms().
  void add_norm(kernels::NormAccumulator& norm, int data_ranks) const;
  /// One a parameter: a gradient of this step has come on this rank.
  [[nodiscard]] std::vector<bool> has_grad() const;

  /// After the vote, one a parameter: a gradient has come on any rank of the group.
  void set_has_grad_anywhere(std::vector<bool> has_grad) { has_grad_anywhere_ = std::move(has_grad); }
  /// Before update(): the sums that it needs are here. Collective, blocks.
  void share_sums();
  /// Where the optimizer has messages in this step, exchanges them: collective, blocks.
  void exchange_messages(const UpdateTerms& terms);
  /// Where the optimizer has facts, then both, in this order; see Updater.
  void measure(const UpdateTerms& terms, TensorFacts& facts) { updater_->measure(has_grad_anywhere_, terms, facts); }
  void conclude(const UpdateTerms& terms, const TensorFacts& facts) {
    updater_->conclude(has_grad_anywhere_, terms, facts);
  }
  /// Updates what has a gradient anywhere; see Updater.
  void update(const UpdateTerms& terms);
  /// This rank's parameters are not those of the others: it has updated them with its own gradients.
  [[nodiscard]] bool has_local_steps() const { return round_ != nullptr && round_->has_local_steps(); }
  /// One a parameter: its name among the tensors of the job.
  [[nodiscard]] std::vector<std::string> tensor_names() const;
  /// Other ranks have elements of one of them.
  [[nodiscard]] bool splits_tensors() const;
  void set_tensors(const TensorFacts& facts);
  /// Between steps, after `committed` ones: what the next one exchanges.
  void begin_round(std::int64_t committed);
  /// Bytes of the next step: where it exchanges messages, those to the owners of pieces are its reduction, and the
  /// results and scales its gather of gradients.
  [[nodiscard]] WireBytes replaced_by_messages(WireBytes wire) const;
  /// The norm that add_norm() has a part of is that of every rank's own gradients, and not of their sum.
  [[nodiscard]] bool has_own_norms() const { return round_ != nullptr && round_->is_on(); }
  /// See Engine::take_writes().
  void take_writes() { updater_->take_all_writes(); }
  /// Instead of update(): keeps the sums, and what has a gradient anywhere, for update_held().
  void hold_sums();
  /// What update_ended() has left of their update.
  void update_held(const UpdateTerms& terms) { updater_->update(held_, terms); }
  /// One a parameter: it has a gradient that hold_sums() has kept.
  [[nodiscard]] const std::vector<bool>& held() const { return held_; }
  /// They were put there from elsewhere; empty: none are there any more.
  void restore_held(std::vector<bool> held);

  [[nodiscard]] const ModelMemory& memory() const { return *memory_; }
  [[nodiscard]] ModelMemory& memory() { return *memory_; }
  /// No other group that has the same elements writes them into a checkpoint.
  [[nodiscard]] bool writes_states() const { return counts_in_norm_; }
  /// Updates so far, one a parameter.
  [[nodiscard]] const std::vector<std::int64_t>& updates() const { return updater_->updates(); }
  void set_updates(std::vector<std::int64_t> updates) { updater_->set_updates(std::move(updates)); }

  [[nodiscard]] MemorySnapshot planned_memory(const ShardingPlan& plan, std::span<const StateDeclaration> states,
                                              int micro_steps) const;
  [[nodiscard]] std::uint64_t planned_files(std::span<const StateDeclaration> states, int micro_steps,
                                            std::size_t stripe_bytes) const;
  [[nodiscard]] FileTraffic planned_file_traffic(BlockSet set, std::span<const StateDeclaration> states,
                                                 int micro_steps, std::span<const int> gathers, int passes) const;
  [[nodiscard]] TierTable planned_tiers(std::span<const StateDeclaration> states, int micro_steps,
                                        std::size_t stripe_bytes) const;
  [[nodiscard]] std::uint64_t resident_bytes() const { return memory_->resident_bytes(); }
  /// Of groups inside the job's.
  [[nodiscard]] std::size_t transport_bytes() const;
  [[nodiscard]] std::size_t staging_bytes() const { return staging_bytes_; }

 private:
  /// Gives the stores' flats the whole model's numbers.
  class Binder;

  /// As memory knows them: buckets that wait for the end of a step wait as those of several micro-steps do.
  [[nodiscard]] int micro_steps_of_memory(int micro_steps) const;

  ShardGroupSpec spec_;
  ModelPart part_;
  GroupColors colors_;
  int size_ = 0;
  int rank_ = 0;              ///< in the group, as size_
  bool has_copies_;           ///< ranks outside the group have the same parameters
  bool counts_in_norm_;       ///< no other rank with the same elements does
  int distinct_color_ = 0;    ///< of ranks with parameters of their own
  GroupColors alike_colors_;  ///< of ranks with the same parameters
  bool shares_job_ = false;
  std::optional<Communicator> communicator_;
  std::shared_ptr<CommBackend> alike_;  ///< ranks with the same parameters, where these are more than the group's
  std::unique_ptr<Binder> binder_;
  std::unique_ptr<ModelMemory> memory_;
  std::unique_ptr<ParameterStore> parameters_;
  std::unique_ptr<GradientStore> gradients_;
  std::unique_ptr<Updater> updater_;
  std::unique_ptr<MessageRound> round_;  ///< null: the optimizer has no messages
  std::unique_ptr<UnitUses> uses_;
  std::vector<bool> trained_;
  std::vector<std::int64_t> writes_;
  std::vector<bool> has_grad_anywhere_;
  std::vector<bool> held_;
  std::vector<int> ended_;  ///< units whose update may begin
  bool stopped_ = false;    ///< no further one in this step: sums are not finite
  std::size_t staging_bytes_ = 0;
};

using ShardGroups = std::vector<std::unique_ptr<ShardGroup>>;

/// Throws kUsage where ranks have updated by themselves since they last synchronised. `committed`: steps so far.
void require_no_local_steps(const ShardGroups& groups, std::int64_t committed, const char* what);

/// Ranks of the group that the rank at `place` is in.
[[nodiscard]] int size_of_group(const ShardGroupSpec& spec, const MeshPlace& place);
/// EngineSettings::shard_groups, or the one group of all units.
[[nodiscard]] std::vector<ShardGroupSpec> shard_groups_of(const EngineSettings& settings);
/// EngineSettings::mesh, or the one axis of all ranks. Throws the errors of validate().
[[nodiscard]] MeshPlace mesh_place_of(const EngineSettings& settings, int rank, int world);
/// EngineSettings::batch_axes, or all of the mesh.
[[nodiscard]] std::vector<std::string> batch_axes_of(const EngineSettings& settings, const MeshPlace& place);
/// Of each of shard_groups_of(). Throws what ShardingPlan::validate() and degrees() throw.
[[nodiscard]] std::vector<Degrees> degrees_of_groups(const EngineSettings& settings, const MeshPlace& place);

/// What a group's plan depends on beside the configuration.
struct GroupTraits {
  bool asynchronous = false;   ///< units are gathered ahead of the caller
  bool narrow_buckets = true;  ///< ExchangeChoice's
  bool beside_device = false;  ///< see ResidencyPlan
  bool messages = false;       ///< Optimizer::has_messages()
};

/// The groups of a rank, not connected yet. Takes the layouts from `split`.
[[nodiscard]] ShardGroups make_shard_groups(ModelParts& split, const EngineSettings& settings, const MeshPlace& place,
                                            int world, GroupTraits traits);

/// Of all groups, and of the buffer for saved tensors.
[[nodiscard]] TierTable planned_tiers(const ShardGroups& groups, const EngineSettings& settings,
                                      std::span<const StateDeclaration> states);

}  // namespace zeroth
