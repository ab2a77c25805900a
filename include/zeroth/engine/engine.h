// Engine: composition root of the torch-free core. Settings -> plan -> memory -> steps.
//
// A front end (the LibTorch adapter, the toy models of the tests) implements ParameterBinder and reports five events:
//   pre_forward, post_forward, pre_backward, post_backward (unit), grad_ready (parameter); and then end_backward().
//   If a parameter may get no gradient, it also reports end_gradients() (unit). Without it the unit is reduced only at
//   the end of the backward.
// One engine belongs to one thread at a time. Several engines may live in one process. While a rank waits in one
// engine, it does no work for its other engines. So if ranks skip units or a backward in one engine, all ranks must
// switch between engines at the same places.
#pragma once

#include <zeroth/base/log.h>
#include <zeroth/base/tensor_view.h>
#include <zeroth/base/version.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/mesh.h>
#include <zeroth/comm/rank_activity.h>
#include <zeroth/compute/kernels.h>
#include <zeroth/device/device.h>
#include <zeroth/engine/checkpoint.h>
#include <zeroth/engine/operation.h>
#include <zeroth/engine/state_access.h>
#include <zeroth/engine/step_follower.h>
#include <zeroth/engine/step_result.h>
#include <zeroth/engine/transfer_report.h>
#include <zeroth/engine/uneven.h>
#include <zeroth/engine/update_settings.h>
#include <zeroth/io/io_queue.h>
#include <zeroth/offload/activation_store.h>
#include <zeroth/optim/loss_scaler.h>
#include <zeroth/optim/optimizer.h>
#include <zeroth/optim/schedule.h>
#include <zeroth/zero/memory_plan.h>
#include <zeroth/zero/message_reduction.h>
#include <zeroth/zero/parameter_store.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

namespace zeroth {

struct GroupResources;
class PhaseClock;
class ShardGroup;
class StepWarnings;
class TransferLog;
struct TransferTotals;
struct CommitVote;
struct OwnTerms;
struct EarlyUpdate;
class CodedStep;
class FreezeWatch;
class TensorFacts;
struct StatePiece;
struct UpdateTerms;
class OperationTable;
class UnevenJoin;
class SaveInFlight;
struct StateFiles;

/// Parameters with a plan and a group of ranks of their own: experts, or matrices that ranks split.
struct ShardGroupSpec {
  std::string name{};  ///< for messages
  /// Ranks that differ along its axes only have the same parameters, share their states and sum their gradients.
  ShardingPlan plan{};
  /// Axes of the mesh along which ranks have other parameters: each its box of a tensor (ParamSpec::logical_shape).
  /// Along an axis that is neither here nor in the plan, ranks have copies, whose gradients are the same without a sum.
  std::vector<std::string> distinct_axes{};
  /// Of an axis of the plan: only ranks with these coordinates along it have the parameters (a weight that two stages
  /// of a pipeline use). The others have nothing of them, boxes without elements. Empty: all ranks have them.
  struct Members {
    std::string axis{};
    std::vector<int> coordinates{};  ///< ascending
  };
  Members members{};
};

/// Files of states that rest there, and what moves their bytes. May differ between ranks.
struct StorageSettings {
  std::vector<std::string> folders{};            ///< one a disk
  std::vector<std::string> parameter_folders{};  ///< of parameters; empty: the same
  IoEngineKind engine = IoEngineKind::kAuto;
  FileAccess access = FileAccess::kDirect;
  int queue_depth = 32;
  std::size_t stripe_bytes = std::size_t{1} << 20U;
  /// Makes the queue; unset: open_io_queue().
  std::function<std::shared_ptr<IoQueue>(const std::string& folder, const IoQueueOptions& options)> own_queue{};
  TransferClock::Now now{};  ///< the clock of transfers; unset: the steady one
};

/// Most bytes that one rank may plan on each tier; 0: no limit of its own.
struct TierBudget {
  std::uint64_t device_bytes = 0;  ///< states that rest where they are updated
  std::uint64_t host_bytes = 0;    ///< states that rest in host memory, blocks on their way and in caches
  std::uint64_t file_bytes = 0;
  bool operator==(const TierBudget&) const = default;
};

/// All settings of the training and of the placement, with all defaults resolved.
struct EngineSettings {
  ShardingPlan plan{};  ///< of all parameters, or of the first of `shard_groups`
  /// Indexed by ParamSpec::shard_group. Empty: one group, of all parameters, by `plan`.
  std::vector<ShardGroupSpec> shard_groups{};
  MeshSpec mesh{};  ///< axes of the ranks; empty: every plan is over all ranks
  /// Axes of the mesh along which ranks have batches of their own; along the others they compute on the same batch.
  /// Empty: all. The gradient of a step is the mean over these batches.
  std::vector<std::string> batch_axes{};
  int micro_steps = 1;
  /// With gradient coding: of each stragglers + 1 ranks, which have the same stragglers + 1 micro-batches, so many may
  /// be late (Engine::chunks()). 0: none.
  int stragglers = 0;
  double gradient_clipping = 0.0;  ///< largest norm; 0: off
  UpdateSettings update{};
  StorageSettings storage{};  ///< used if a plan has states in files
  /// Of a store for saved tensors in files, which the front end fills; unset: there is none. May differ between ranks.
  std::optional<ActivationStoreOptions> activations{};
  TierBudget budget{};
  OptimizerOptions optimizer{};
  /// Makes an optimizer of the caller's own; unset: make_optimizer(). The same on all ranks.
  std::function<std::unique_ptr<Optimizer>()> own_optimizer{};
  /// Makes the reductions of an optimizer whose ranks exchange messages; unset: make_reduction(). The same on all
  /// ranks.
  MakeReduction own_reduction{};
  /// Makes the kernels; unset: make_kernels(). Their memory is where the states lie.
  std::function<std::unique_ptr<Kernels>(Device& device, ThreadPool& pool)> own_kernels{};
  std::vector<GroupHyper> groups{1};  ///< indexed by ParamSpec::group
  LearningRateSchedule schedule{};
  int max_nonfinite_steps = 10;  ///< steps in a row skipped for SkipCause::kNonFinite that end the training
  LossScaling loss_scaling{};    ///< the front end multiplies gradients by Engine::loss_scale()
  Uneven uneven = Uneven::kError;
  bool compare_replicas = false;         ///< after each update ranks compare what several of them should have alike
  int threads = 1;                       ///< of CPU kernels; the same on all ranks
  std::uint64_t memory_limit_bytes = 0;  ///< of all ranks of this host together; 0: available memory of the system
  std::string configuration{};           ///< Config::shared_json(), compared between ranks; may be empty
  std::string version{version_text()};   ///< of Zeroth, compared between ranks
  std::string libraries{};               ///< of the front end, "torch 2.11.0", compared between ranks; may be empty

  /// Bytes of memory for saved tensors on their way to files.
  [[nodiscard]] std::size_t activation_staging() const {
    return activations ? ActivationStore::memory_bytes(*activations) : 0;
  }
};

/// Calls that a rank without a batch makes; see Engine::next_batch().
struct JoinedCalls {
  std::function<void()> step{};  ///< must call Engine::step(); unset: the engine calls it
};

/// One forward of a unit. Several forwards may be outstanding.
struct Invocation {
  int unit = 0;
  std::uint64_t forward_seq = 0;
  std::int64_t micro_step = 0;
  bool evaluates = false;  ///< no backward follows
};

/// Planned and measured memory of one rank, in bytes.
struct MemoryReport {
  MemorySnapshot planned{};
  MemorySnapshot measured_peak{};  ///< live tagged bytes at the moment of the highest total
  MemorySnapshot live{};
  std::uint64_t construction_peak =
      0;  ///< bytes of the temporary buffer while values were brought in: the largest flat
  std::uint64_t live_gathered_peak = 0;  ///< bytes of gathered parameters in use at once
  int live_slots_peak = 0;               ///< ring slots in use at once
  std::uint64_t overflow_slots = 0;
  std::uint64_t order_deviations = 0;  ///< ParameterStore::Counters'
  std::uint64_t demand_fetches = 0;    ///< likewise: reads of parameters in files that nobody had foreseen
  std::uint64_t spills = 0;
  std::uint64_t resident =
      0;  ///< of the engine's own mappings (Rss, from smaps): what is planned, or wide, and was touched
  std::uint64_t transport = 0;         ///< control blocks and staging of this engine's groups; in no plan
  std::uint64_t pss = 0;               ///< this process, from smaps_rollup
  std::uint64_t planned_files = 0;     ///< bytes on disk of states that rest there
  std::uint64_t measured_files = 0;    ///< blocks that the file systems have given to their files
  std::uint64_t activation_files = 0;  ///< blocks that the file systems have given to saved tensors; in no plan
  std::uint64_t checkpoint_copy = 0;   ///< of this rank's part of the last save_async(), kept for the next; in no plan
  std::uint64_t compute_copies =
      0;  ///< parameters' copies in the memory of the device that computes, where that is another one
  std::uint64_t bus_down = 0;       ///< bytes of states that have come from the device since the engine was made
  std::uint64_t bus_up = 0;         ///< that have gone to it
  std::string residency_choice{};   ///< which states rest in files and why, if the engine has chosen it
  std::string activation_choice{};  ///< Engine::set_activation_choice()
};

/// Table with one line a state. Several lines, no trailing newline.
[[nodiscard]] std::string to_text(const MemoryReport& report);

class Engine {
 public:
  /// Collective, blocks. Before it allocates, it checks that all ranks have the same structure and settings (kMismatch,
  /// with rank and parameter) and that the plan fits (kOutOfMemory, with the table and the smallest plan that fits).
  /// The engine shares `backend`. It borrows `device` and `binder`, which must outlive it.
  Engine(std::vector<ParamSpec> params, std::vector<UnitSpec> units, EngineSettings settings, Device& device,
         std::shared_ptr<CommBackend> backend, ParameterBinder& binder, Logger logger);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  /// From now on the engine reports its phase to `activity`. Null: no reports.
  void set_activity(std::shared_ptr<RankActivity> activity);
  /// Null: nobody watches.
  [[nodiscard]] const std::shared_ptr<RankActivity>& activity() const { return activity_; }

  /// Collective, blocks. Copies the values of the first rank that has a parameter, rank 0 where all have it, to the
  /// others. `values(param)` returns this rank's dense data in the
  /// parameter's dtype. The engine calls `release(params)` when it has read the values of these, some of one unit.
  /// Units with replicated parameters are bound when this returns.
  void initialize(const std::function<ConstTensorView(int)>& values,
                  const std::function<void(std::span<const int> params)>& release);

  /// Makes a numbered invocation of a unit. `evaluates`: no backward follows. Never blocks.
  [[nodiscard]] Invocation begin_forward(int unit, bool evaluates = false);
  /// Takes a lease on the unit's parameters and gathers them if needed (stage 3): may block for other ranks.
  void pre_forward(const Invocation& use);
  /// Gives the lease back. `awaits_backward`: a backward of this use follows, so the unit may stay gathered (see
  /// Reshard). Throws kUsage without a pre_forward().
  void post_forward(const Invocation& use, bool awaits_backward);
  /// Replaces post_forward() after a forward that threw. Does nothing if abandon() was called meanwhile.
  void drop_forward(const Invocation& use) noexcept;
  /// Saved tensors in files, for the front end; null unless EngineSettings::activations is set. It may outlive the
  /// engine.
  [[nodiscard]] const std::shared_ptr<ActivationStore>& activations() const { return activations_; }
  /// What the front end does with saved tensors, and why: for the log of rank 0, and for the memory report.
  void set_activation_choice(std::string choice);
  /// Takes the unit's lease for this backward, once; may gather and block as pre_forward() does.
  void pre_backward(int unit);
  /// Gives the unit's leases back: this backward no longer needs its parameters. Idempotent.
  void post_backward(int unit);
  /// `grad`: the dense gradient of the whole parameter, in the parameter's or the accumulation dtype. It is copied, so
  /// the caller may reuse it on return. May block for a bucket slot. The last expected gradient of a unit publishes the
  /// unit's bucket. Throws kUsage for a parameter that is not trainable.
  void grad_ready(int param, ConstTensorView grad);
  /// Closes the unit early: it is reduced now, and expected gradients that are missing count as zero. Call it before
  /// the pre_backward() of the next unit. Then ranks that leave out different parameters reduce and gather in one
  /// order.
  void end_gradients(int unit);
  /// True if all expected gradients of the unit have come in this backward.
  [[nodiscard]] bool gradients_complete(int unit) const;
  /// Publishes all open buckets and gives back all leases of the backward. It waits for other ranks only where
  /// reductions are collectives.
  void end_backward();
  /// Call after a forward or backward that threw: gives back all leases. After a failed backward the step is skipped on
  /// all ranks.
  void abandon(bool in_backward);

  /// Ends a micro-step. On the last one all ranks vote and then update or skip: collective, blocks. On the others it
  /// returns at once.
  /// Throws kUsage without a backward since the last step(). On the last micro-step it throws on every rank, names the
  /// first rank without a backward, and drops all gradients of the step. On the others it throws on this rank only and
  /// changes nothing. Throws kNonFinite after max_nonfinite_steps skipped steps in a row, kMismatch if the ranks'
  /// groups differ or the ranks trained different parameters, kUsage if no parameter can train, and the errors of the
  /// transport, and what a save_async() ended with.
  StepResult step();

  /// The next step() is that of the last micro-step. With EngineSettings::stragglers it may also be an earlier one,
  /// because other ranks have run what the step needs: step() then ends the step, and its result is a boundary. Never
  /// blocks; stays true until step().
  [[nodiscard]] bool ends_step();
  /// With EngineSettings::stragglers: the numbers of this rank's micro-batches among the world's, one a micro-step.
  [[nodiscard]] std::vector<int> chunks() const;

  /// For a front end that runs the backwards of a step's micro-steps in parts and in an order of its own, as a pipeline
  /// does: it says before each backward what it is of, and step_all() ends the step. Before the first forward.
  /// `gathers`: of each unit in a step, for planned_wire().
  void steer(std::vector<int> gathers);
  struct BackwardPart {
    int micro_step = 0;  ///< for what is said of a gradient
    /// It brings the last gradients that they have in a micro-step; with ReductionPolicy::kPerMicroStep their reduction
    /// begins in it.
    std::span<const int> units{};
    /// Of these, the last of the step. With ReductionPolicy::kPerStep their reduction begins in it.
    std::span<const int> last{};
  };
  /// After steer(), of the next backward.
  void begin_part(const BackwardPart& part);
  /// Ends the step, collective, as the last step() of an accumulation.
  StepResult step_all();
  /// Keeps the unit gathered until give_back(): the leases of its forwards and backwards cost nothing meanwhile. May
  /// block for other ranks. Needs slots for all that is kept: Reshard::kStep. Calls are counted. Before step_all() all
  /// must be given back.
  void keep_gathered(int unit);
  void give_back(int unit);
  /// Some forward, backward or caller has the unit gathered now.
  [[nodiscard]] bool holds(int unit) const;

  /// Masters of 16-bit parameters take what the caller has written to parameters that rest where they are computed with
  /// (stages 0 to 2). Ranks must write alike. An update does it by itself: this is for reads before it. Local.
  void take_writes();
  /// What the caller has written to parameters since the ranks last had the same values, where each rank has all of
  /// them (stages 0 to 2): numbers of parameters, each with a digest above 0 of its value now. The ranks that share a
  /// parameter compare it in step(), save() and reads of states, and all throw kMismatch with the names if it differs;
  /// nothing is updated, saved or read then. Replaces what was said before. Local.
  void set_writes(std::span<const std::pair<int, std::int64_t>> writes);
  /// Collective, blocks, where parameters are not gathered. Throws what set_writes() says.
  void require_same_writes();
  /// Updates now with the gradients of the micro-steps that there were since the last update, as at the end of an epoch
  /// whose batches are no multiple of micro_steps. The gradient is their mean. A backward that no step() has taken is a
  /// micro-step of its own. Returns a result without a boundary, and changes nothing, if there was none. Collective,
  /// blocks. Throws what step() throws, and kMismatch on every rank if ranks are in different micro-steps.
  StepResult end_accumulation();
  /// Drops the gradients since the last update, as zero_grad() does in torch: those of all micro-steps of an
  /// accumulation, which begins anew. Collective and blocking if there are any; otherwise it does nothing. Throws
  /// kUsage on every rank, with nothing changed, if it drops a second accumulation after a step() without an update in
  /// between: a loop that does so never trains. Throws kMismatch on every rank if some call step().
  void discard_gradients();
  /// True if a backward has ended on this rank since the last step().
  [[nodiscard]] bool has_gradients() const noexcept { return had_backward_; }

  /// Sets whether later backwards bring a gradient of this trainable parameter; the default is true. A unit is reduced
  /// as soon as all its expected gradients have come. Call it outside backward, with the same values on all ranks.
  void expect_gradient(int param, bool expected);
  /// Call it once before the first batch of an epoch. It brings back ranks without a batch if the others left an epoch
  /// early.
  void begin_epoch();
  /// Call it before each batch on all ranks, with true if this rank has another batch. Collective, blocks. Returns true
  /// if the rank shall train on that batch. If only some ranks have a batch, settings().uneven decides:
  ///   kError  throws kMismatch on all ranks and changes nothing
  ///   kDrop   returns false on all ranks
  ///   kJoin   returns true on a rank with a batch. A rank without a batch takes part, without gradients, in the other
  ///           ranks' forward, backward, step(), discard_gradients(), average(), barrier() and every added operation
  ///           that has a `join`. It returns false when no rank has a batch. The gradient of a step is the mean over
  ///           the existing micro-batches (StepResult::batches); average() is the mean over the ranks with a batch. Any
  ///           other call of all ranks throws kUsage. A joined rank follows one engine.
  [[nodiscard]] bool next_batch(bool has_batch, const JoinedCalls& calls = {});
  /// next_batch() in parts, for front ends that make that call themselves: begin_batch(), then join() after each kStep.
  [[nodiscard]] Next begin_batch(bool has_batch);
  [[nodiscard]] Next join();

  /// Changes a group's hyper-parameters from the next update on. All ranks must set the same values: otherwise the next
  /// step() throws kMismatch. Throws kUsage for a group that does not exist, and for momentum where the optimizer keeps
  /// none. Never blocks.
  void set_group(int group, const GroupHyper& hyper);
  /// Learning rates of the next update, one per group.
  [[nodiscard]] std::vector<double> learning_rates() const;
  /// Mean of `value` over the ranks. Collective, blocks. Ranks compare `name`, as in barrier(); on one-sided transports
  /// this costs one more call. Without names, two averages in a different order on one rank give wrong numbers on all
  /// ranks and no error.
  [[nodiscard]] double average(double value, std::string_view name = {});
  /// Copies the whole current flat to `out` (flat.bytes()), between steps. Collective, blocks; `out` is null on ranks
  /// that do not need the values. On a one-sided transport a rank may call it alone, unless parameters are in files.
  void read_flat(int flat, std::byte* out);
  /// Collective, blocks: writes all states of all ranks as the checkpoint of this step into `folder`, between steps.
  /// Returns its path when it is on the disk under its final name. Throws on every rank alike: kIo, which leaves the
  /// checkpoints that are there; kUsage in the middle of a step, or if the step was saved there before. Format and
  /// guarantees: zeroth/checkpoint/manifest.h, zeroth/checkpoint/folder.h.
  std::string save(const std::string& folder, const SaveOptions& options = {});
  /// save(), of which only the copy of this rank's part into memory of the host is waited for; files and commit follow
  /// on a thread. Collective, blocks for the copy, and for an earlier one that has not ended. The states are those of
  /// this step, whatever is trained meanwhile. Memory: as large as this rank's file, kept for the next
  /// (MemoryReport::checkpoint_copy). Throws as save() does until the copy is made. What fails later is thrown on every
  /// rank alike, once, by the next step() after all ranks have heard of it in a vote, or by save(), load() or
  /// SaveHandle::wait(), whichever comes first. These calls have changed nothing then and may be made again. The
  /// destructor finishes the save.
  SaveHandle save_async(const std::string& folder, const SaveOptions& options = {});
  /// Collective, blocks: brings all states of a checkpoint, of any number of ranks, any plan and any transport. `path`:
  /// a checkpoint, or a folder, of which the newest whole one is taken. Throws on every rank alike, with nothing
  /// changed: kCheckpoint for one that is torn, corrupt or of another model; kIo; kUsage in the middle of a step. Needs
  /// memory for this rank's states once more while it runs.
  LoadReport load(const std::string& path, const LoadOptions& options = {});
  /// Calls take(tensor) for each tensor of the query, on the ranks that want them, unit by unit: other ranks need
  /// memory for their own part of a unit, readers for all of it once more. Collective, blocks; between steps, or
  /// between the backward and step(). Throws on every rank alike: kUsage for an unknown name or kind, and for gradients
  /// in the middle of an accumulation or after a failed backward; kMismatch if ranks ask for other things. Gradients
  /// that no rank has are left out. Wire: every element once to each reader.
  void read_states(const StateQuery& query, const std::function<void(StateTensor)>& take);
  /// Names of units' parameters, in the order in which read_states() takes them all: what a caller may ask for at once.
  [[nodiscard]] std::vector<std::vector<std::string>> state_batches() const;
  /// This rank's part of a state, without communication. Gradients only after read_states() of the step has formed
  /// their sums. Throws kUsage for an unknown kind.
  [[nodiscard]] std::vector<StatePart> local_states(const std::string& kind);
  /// The kinds of read_states() that there are.
  [[nodiscard]] std::vector<std::string> state_kinds() const;
  /// Replaces weights and their masters on all ranks; other states stay. Collective, blocks; between steps. Throws
  /// kUsage on every rank alike, with nothing changed, for unknown names, in the middle of a step, and while an average
  /// is applied.
  void write_weights(const WeightWrite& write);

  /// Whether gradients of the last step wait for their update (UpdateSettings::delayed_after).
  [[nodiscard]] bool has_delayed_update() const;
  /// Updates with them now, and not in the next step, as at the end of a training. Does nothing if none wait.
  /// Collective, blocks; between steps.
  void flush_update();

  /// Keeps an average of all trainable parameters, where the optimizer's states are, in the dtype of masters. It begins
  /// as the masters, and is a state: `name` is its kind, save() and load() have it. Collective, blocks. Throws kUsage
  /// for a name that is not new.
  void add_average(const std::string& name);
  /// average += (1 - decay) * (master - average). Local: no communication. The same bits at every stage.
  void update_average(const std::string& name, double decay);
  /// Exchanges masters and average, to the bit, on all ranks; parameters are the rounded averages until the next call,
  /// and step() and write_weights() throw kUsage. Collective, blocks; between steps.
  void swap_average(const std::string& name);
  /// The average whose values the parameters have now; "" if they have their own.
  [[nodiscard]] const std::string& applied_average() const { return applied_average_; }
  /// Throws kUsage, naming `what`, while an average is applied.
  void require_own_weights(const char* what) const;
  /// Throws kUsage, naming `what`, where parameters may be of two versions: between the last backward of a step and its
  /// step() if an update runs inside that backward (UpdateSettings), and after a step that was refused then.
  void require_whole(const char* what) const;
  void require_not_torn(const char* what) const;
  /// The same, and where ranks have updated by themselves since they last synchronised (Optimizer::has_local_steps()).
  void require_same_weights(const char* what) const;
  /// Throws kUsage, naming `what`, in the middle of a step: micro-steps or a backward wait for step().
  void require_quiet(const char* what) const;

  /// Blocks until all ranks are in this barrier. `name` appears in errors and in the flight recorder. Ranks in barriers
  /// of different names get kMismatch with both names.
  void barrier(std::string_view name = {});
  /// Adds a call that all ranks make together: sync() with its number, then what it consists of. All ranks add the same
  /// rows in the same order, between construction and the first call. Throws kUsage for a name that is not new.
  [[nodiscard]] OperationId add_operation(Operation row);
  /// Blocks until all ranks have come to this call, and reduces gradients meanwhile. Once training has begun, it must
  /// come before every matched call on communicator(). Without it a rank in backward could wait for a rank in that
  /// call. `name` as in barrier(). Throws kMismatch if other ranks are in another operation, and kUsage if ranks
  /// without a batch cannot join it.
  void sync(OperationId what, std::string_view name = {});
  /// Runs a call that all ranks make together; such calls may be nested. An exception that is no Error (Ctrl-C in a
  /// wait, for example) separates this rank from the others for good: they get kAborted, and every later such call on
  /// this rank throws kAborted too.
  template <class Call>
  decltype(auto) together(Call&& call) {
    require_not_parted();
    try {
      return std::forward<Call>(call)();
    } catch (const Error& error) {
      if (!activity_ || typeid(error) != typeid(Error)) throw;  // a verdict says it already
      throw activity_->dated(error);
    } catch (...) {
      part();
      throw;
    }
  }

  /// Whether any parameter may ever train. Without one the engine gathers and evaluates, and step() throws kUsage.
  [[nodiscard]] bool trains() const;
  /// The whole model of this rank. Each flat is cut for the ranks of its unit's shard group.
  [[nodiscard]] const ModelLayout& layout() const { return layout_; }
  [[nodiscard]] const EngineSettings& settings() const { return settings_; }
  [[nodiscard]] MemoryReport memory_report() const;
  [[nodiscard]] WireBytes planned_wire() const;
  [[nodiscard]] const ParameterStore::Counters& counters() const { return counters_; }
  /// What moved between memory and files, beside the formula, and what the training waited for it. Local.
  [[nodiscard]] TransferReport transfer_report() const;
  /// From now on the engine keeps what the rank does and what moves between memory and files, the latest 65,536 pieces
  /// of each; false: no more. What was kept is dropped.
  void trace_transfers(bool on);
  /// What was kept, in Chrome's trace format (chrome://tracing, ui.perfetto.dev).
  [[nodiscard]] std::string transfer_trace() const;
  /// Resets the peaks, and the sums of transfer_report(), to measure a phase by itself.
  void reset_peaks();
  [[nodiscard]] std::int64_t committed_steps() const { return committed_steps_; }
  /// Micro-steps of the running step that have ended.
  [[nodiscard]] int micro_step() const { return micro_step_; }
  /// By which the front end multiplies the loss, or its gradients, until the step's end; the update takes it out again.
  [[nodiscard]] double loss_scale() const { return scaler_.scale(); }
  [[nodiscard]] int rank() const { return communicator_.rank(); }
  [[nodiscard]] int world() const { return communicator_.size(); }
  [[nodiscard]] const Communicator& communicator() const { return communicator_; }

  /// What goes on beside the steps; null: nothing.
  [[nodiscard]] StepFollower* follower() const { return follower_.get(); }

 private:
  friend class LocalUpdates;  // works on the states of groups, between steps
  struct OwnOperations;
  /// A parameter, unit or flat by its group's number.
  struct InGroup {
    ShardGroup& group;
    int index;
  };
  [[nodiscard]] InGroup at(PartIndex place) const {
    return {*groups_[static_cast<std::size_t>(place.part)], place.index};
  }
  [[nodiscard]] InGroup param_at(int param) const { return at(split_.params[static_cast<std::size_t>(param)]); }
  /// A unit's parts in the groups of its parameters.
  [[nodiscard]] const std::vector<PartIndex>& parts_of(int unit) const {
    return split_.units[static_cast<std::size_t>(unit)];
  }
  [[nodiscard]] InGroup flat_at(int flat) const { return at(split_.flats[static_cast<std::size_t>(flat)]); }

  void enter(Phase phase, int unit = -1) noexcept;
  [[nodiscard]] std::chrono::nanoseconds waited() const noexcept {
    return activity_ ? activity_->waited() : std::chrono::nanoseconds{0};
  }
  void build_groups();
  [[nodiscard]] StateFiles open_files();
  void open_activations();
  /// Takes what has ended: transfers that wait for a free place begin, and ends have their time.
  void look_at_files() const;
  [[nodiscard]] TransferTotals transfer_totals() const;
  /// Of the group's units, where the front end has said it (steer()); else empty.
  [[nodiscard]] std::vector<int> gathers_of(const ShardGroup& group) const;
  /// For waits that are not for ranks. Throws the verdict of the control plane, and if a rank has stopped or is lost.
  void look_after_others();
  [[nodiscard]] Kernels& host_kernels() const { return host_kernels_ ? *host_kernels_ : *kernels_; }
  void say_where_files_are();
  void say_what_is_not_pinned() const;
  void allocate_groups();
  void sync_groups(OperationId what, std::string_view name);
  void forget_order();
  /// On a rank without a batch: takes part until no rank has a batch, another epoch begins, or the front end must act.
  [[nodiscard]] Next follow();
  /// Ends the state in which ranks have no batch. All ranks call it at the same place.
  void end_uneven_join();
  [[nodiscard]] double sum_over_ranks(double value, std::string_view name = {});
  void compare_names(OperationId what, std::string_view name);
  /// `micro_steps`: of the step.
  StepResult finish_step(bool idle, int micro_steps);
  // src/engine/early_update.cpp
  /// Units may be updated inside the running backward.
  [[nodiscard]] bool updates_early() const;
  /// Before the first gradient of a backward: with which terms.
  void begin_early_update();
  /// Updates the units that can be.
  void advance_early_update();
  void publish_updates();
  /// Parts of what changes states after the vote. Nothing of it runs after a failure but publish_guarded(), for which
  /// others wait. settle_update() ends it on all ranks, and throws if it failed on one.
  static void update_guarded(std::exception_ptr& failure, const std::function<void()>& part);
  void publish_guarded(std::exception_ptr& failure);
  void settle_update(const std::exception_ptr& failure);
  /// The verdict on a step is there: keeps its gradients for the next step.
  void delay_update(UpdateTerms terms);
  /// Updates what no backward has updated of the step before, if an update was delayed.
  void finish_delayed_update();
  /// The first pass of an optimizer that needs to know of whole parameters. Collective, blocks.
  void measure_tensors(const UpdateTerms& terms);
  /// After a committed step: variances may have settled. Collective, blocks.
  void look_at_variances();
  /// The same outside of a step, for all ranks together, of an update that was delayed: published and settled.
  void end_delayed_update();
  /// Whose gradients are summed, before the vote; collective where there is a gradient code. -1, or the first of a few
  /// ranks of which one would be needed.
  int choose_summed(std::vector<int>& left_out);
  /// Completes all sums of the step, then runs the vote of all ranks.
  CommitVote cast_vote(bool idle, bool discards);
  [[nodiscard]] OwnTerms own_terms(int shard_group) const;
  struct StatesRead;
  struct StateSources;
  void require_between_steps(const char* where) const;
  /// A save may be between micro-steps: a backward has been given to step().
  void require_between_micro_steps(const char* where) const;
  /// Collective: all ranks are in the same micro-step, and have the sums of those before. Throws kMismatch, kUsage.
  void settle_accumulation();
  [[nodiscard]] std::string describe_accumulation();
  void read_accumulation(StatesRead& read, LoadReport& report, const LoadOptions& options, StateSources& sources);
  void take_accumulation(const StatesRead& read);
  [[nodiscard]] std::vector<StatePiece> pieces_of(const ShardGroup& group) const;
  [[nodiscard]] std::vector<StatePiece> pieces_of(const ShardGroup& group, bool with_held) const;
  [[nodiscard]] Manifest describe_states() const;
  [[nodiscard]] std::string describe_all_params();
  /// Collective, blocks. On rank 0 all of it but the files; empty on the others.
  [[nodiscard]] Manifest make_manifest(const SaveOptions& options, const std::string& run, const CheckpointBase& base);
  static void add_params_of_others(Manifest& manifest, const std::string& all);
  struct RankFilePlan;
  /// A checkpoint that has the frozen weights that this engine has.
  struct FrozenBase {
    std::string path;  ///< of the checkpoint
    std::string run;
  };
  [[nodiscard]] RankFilePlan plan_rank_file(const SaveOptions& options, const CheckpointBase& base);
  /// On rank 0; warns once of checkpoints of later steps.
  [[nodiscard]] std::unique_ptr<PendingCheckpoint> begin_checkpoint(const std::string& folder, const std::string& run,
                                                                    const SaveOptions& options);
  /// On rank 0: the checkpoint in `folder` that a save may refer to, marked as such; none if there is none.
  [[nodiscard]] CheckpointBase base_in(const std::string& folder, const SaveOptions& options) const;
  void each_part(const RankFilePlan& plan, const std::function<void(std::span<const std::byte>)>& write);
  [[nodiscard]] std::span<std::byte> checkpoint_copy(std::size_t bytes);
  /// Collective, blocks until the save that runs behind has ended; all ranks know how.
  void settle_save();
  /// All ranks know from the vote whether it has ended.
  void settle_save(const CommitVote& vote);
  /// Throws what the save that ran behind ended with, once.
  void report_failed_save();
  void finish_save() noexcept;
  [[nodiscard]] static LoadReport choose_checkpoint(const std::string& path, const LoadOptions& options);
  [[nodiscard]] StatesRead read_states(LoadReport& report, const LoadOptions& options);
  void require_optimizer_of(const Manifest& manifest, const std::string& path, const LoadOptions& options) const;
  /// Collective: which hyper-parameters the groups get. Throws on all ranks alike.
  void settle_hypers(StatesRead& read, const LoadReport& report, const LoadOptions& options);
  /// Collective: some parameter of the model is in the checkpoint. Throws on all ranks alike.
  void require_any_parameter(const Manifest& manifest, const std::string& path, const LoadOptions& options) const;
  void take_states(const StatesRead& read, const Manifest& manifest);
  void meet(OperationId what, const std::string& text);
  [[nodiscard]] bool has_kind(const std::string& kind) const;
  void require_kind(const std::string& kind) const;
  /// With the whole model's numbers. Gradients are times `factor`.
  [[nodiscard]] std::vector<StatePiece> pieces_of_kind(const std::string& kind, double factor);
  /// Sums of the gradients of this step on all ranks; returns what makes means of them, none if no rank has any.
  [[nodiscard]] std::optional<double> complete_gradients();
  void read_batch(const StateQuery& query, const std::vector<std::string>& names, const std::vector<StatePiece>& pieces,
                  const std::function<void(StateTensor)>& take);
  /// The parameters that are boxes of the tensor of a name or alias: mostly one.
  [[nodiscard]] std::vector<int> params_named(const std::string& name) const;
  void republish(std::string_view what);
  /// For each parameter of the average that this rank has a part of: its weight and its average.
  void for_average(const std::string& name, const std::function<void(const StatePiece&, const StatePiece&)>& body);
  /// Of the commit vote's first offender; "" without one. Blocks.
  [[nodiscard]] std::string name_of_offender(const CommitVote& vote) const;
  void forget_gradients();
  void require_not_parted() const;
  void part() noexcept;

  std::shared_ptr<RankActivity> activity_;
  int watched_as_ = -1;  ///< RankActivity::add_model()
  std::unique_ptr<StepWarnings> warnings_;
  std::unique_ptr<PhaseClock> clock_;
  std::int64_t backwards_ = 0;   ///< since the last step()
  std::int64_t boundaries_ = 0;  ///< steps ended, committed or not
  EngineSettings settings_;
  Device& device_;
  Communicator communicator_;
  ParameterBinder& binder_;
  Logger log_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Kernels> kernels_;
  std::unique_ptr<Kernels> host_kernels_;  ///< beside a device; else null
  MeshPlace place_;
  ModelLayout layout_;
  ModelParts split_;  ///< its parts are in groups_
  LossScaler scaler_;
  std::unique_ptr<EarlyUpdate> early_;
  std::unique_ptr<OperationTable> operations_;
  std::unique_ptr<OwnOperations> own_;
  ParameterStore::Counters counters_;
  std::unique_ptr<GroupResources> resources_;
  std::vector<std::unique_ptr<ShardGroup>> groups_;
  std::unique_ptr<UnevenJoin> uneven_join_;
  std::unique_ptr<StepFollower> follower_;
  std::unique_ptr<TensorFacts> tensor_facts_;  ///< null: the optimizer has none
  std::unique_ptr<CodedStep> code_;            ///< null: a step needs all ranks
  std::unique_ptr<FreezeWatch> freeze_watch_;  ///< null: the optimizer freezes no variances
  Arena checkpoint_copy_;
  std::shared_ptr<TransferClock> transfers_;
  std::unique_ptr<TransferLog> transfer_log_;
  std::shared_ptr<ActivationStore> activations_;
  MemoryHold activations_hold_;
  std::shared_ptr<Engine*> self_ = std::make_shared<Engine*>(this);
  std::optional<FrozenBase> frozen_base_;
  bool told_of_later_ = false;  ///< see begin_checkpoint()
  std::shared_ptr<SaveInFlight> saving_;
  std::string residency_choice_;    ///< see MemoryReport
  std::string activation_choice_;   ///< likewise
  bool leads_batch_ = true;         ///< the first rank of those that compute on its batch
  int data_ranks_ = 1;              ///< ranks with batches of their own
  std::size_t reported_group_ = 0;  ///< the first group with a trainable parameter: the one of StepResult::lr
  bool parted_ = false;             ///< see together()
  std::uint64_t forward_seq_ = 0;
  int micro_step_ = 0;
  bool joins_short_step_ = false;  ///< on a rank without a batch: its next step() is end_accumulation()
  int dropped_in_a_row_ = 0;       ///< accumulations that were dropped after a step(), since the last update
  std::vector<int> gathers_{};     ///< see steer()
  bool had_backward_ = false;
  bool backward_failed_ = false;
  std::int64_t committed_steps_ = 0;
  std::uint64_t construction_peak_ = 0;
  std::string applied_average_{};
  std::optional<double> gradient_factor_{};  ///< of sums that are complete in this step
};

}  // namespace zeroth
