// Engine: composition root of the torch-free core. Settings -> plan -> memory -> steps.
//
// A front end (the LibTorch adapter, the toy models of the tests) owes it five events and implements ParameterBinder:
//   pre_forward, post_forward, pre_backward, post_backward (unit), grad_ready (parameter); and end_backward(). Where a
//   parameter may get no gradient, end_gradients() (unit), too, or its unit is reduced only when the backward ends.
// One engine belongs to one thread at a time. Several engines may live in one process. While a rank waits in one of
// them it does nothing for the others: ranks that skip units in one engine, or leave its backward out, take turns
// between engines at the same places.
#pragma once

#include <zeroth/base/log.h>
#include <zeroth/base/tensor_view.h>
#include <zeroth/base/version.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/rank_watch.h>
#include <zeroth/device/device.h>
#include <zeroth/engine/step_result.h>
#include <zeroth/engine/uneven.h>
#include <zeroth/optim/optimizer.h>
#include <zeroth/optim/schedule.h>
#include <zeroth/zero/memory_plan.h>
#include <zeroth/zero/parameter_store.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <typeinfo>
#include <vector>

namespace zeroth {

class GradientStore;
class PhaseClock;
class StepWarnings;
class UnitUses;
struct CommitVote;
enum class SyncPoint : std::uint8_t;
enum class NextCall : std::uint8_t;
class UnevenJoin;

/// Everything that decides what is trained and how it is placed: resolved, no defaults left open.
struct EngineSettings {
  ShardingPlan plan{};
  int micro_steps = 1;
  double gradient_clipping = 0.0;  ///< largest norm; 0: off
  OptimizerOptions optimizer{};
  std::vector<GroupHyper> groups{1};  ///< indexed by ParamSpec::group
  LearningRateSchedule schedule{};
  int max_nonfinite_steps = 10;  ///< so many skipped steps in a row end the training
  Uneven uneven = Uneven::kError;
  int threads = 1;                       ///< for kernels; the same on all ranks
  std::uint64_t memory_limit_bytes = 0;  ///< for all ranks of this host together; 0: what the system says is available
  std::string configuration{};           ///< Config::shared_json(), compared between ranks; may be empty
  std::string version{version_text()};   ///< of Zeroth, compared between ranks
  std::string libraries{};  ///< that the front end computes with, "torch 2.11.0", compared between ranks; may be empty
};

/// What a rank does next; see Engine::next_batch().
enum class Next : std::uint8_t {
  kBatch,         ///< train with its batch
  kEnd,           ///< end its epoch
  kStep,          ///< it has no batch: call step(), as the others do, and then join()
  kShareBuffers,  ///< it has no batch: share buffers, as the others do, and then join()
};

/// For ranks without a batch; see Engine::next_batch().
struct JoinedCalls {
  std::function<void()> step{};           ///< calls Engine::step(); none: the engine does
  std::function<void()> share_buffers{};  ///< meets for kBuffers and does what comes after it
};

/// One use of a unit. Several forwards may be outstanding.
struct Invocation {
  int unit = 0;
  std::uint64_t forward_seq = 0;
  std::int64_t micro_step = 0;
  bool evaluates = false;  ///< no backward follows
};

/// Planned and measured, so that they can be compared.
struct MemoryReport {
  MemorySnapshot planned{};
  MemorySnapshot measured_peak{};  ///< live tagged bytes at the moment of the highest total
  MemorySnapshot live{};
  std::uint64_t construction_peak =
      0;  ///< bytes of the temporary buffer while values were brought in: the largest flat
  std::uint64_t live_gathered_peak = 0;  ///< bytes of gathered parameters in use at once
  int live_slots_peak = 0;               ///< ring slots in use at once
  std::uint64_t overflow_slots = 0;
  std::uint64_t spills = 0;
  std::uint64_t resident =
      0;  ///< of the engine's own mappings (Rss, from smaps): what is planned, or wide, and was touched
  std::uint64_t transport = 0;  ///< control blocks and staging of this engine's groups; in no plan
  std::uint64_t pss = 0;        ///< this process, from smaps_rollup
  std::uint64_t compute_copies =
      0;  ///< parameters' copies in the memory of the device that computes, where that is another one
};

/// Table with one line a state. Several lines, no trailing newline.
[[nodiscard]] std::string to_text(const MemoryReport& report);

class Engine {
 public:
  /// Collective. Checks that all ranks have the same structure and settings (kMismatch names rank and parameter) and
  /// that the plan fits (kOutOfMemory, with the table and the smallest plan that fits), before anything is allocated.
  /// `device` and `binder` must outlive the engine.
  Engine(std::vector<ParamSpec> params, std::vector<UnitSpec> units, EngineSettings settings, Device& device,
         std::shared_ptr<CommBackend> backend, ParameterBinder& binder, Logger logger);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  /// Says from now on where this rank is. Null: nobody asks.
  void set_watch(std::shared_ptr<RankWatch> watch);

  /// Collective. Brings rank 0's values to all ranks; `values(param)` is this rank's dense data. `release(unit)` is
  /// called when the values of a unit are no longer needed. Replicated units are bound when this returns.
  void initialize(const std::function<ConstTensorView(int)>& values, const std::function<void(int)>& release);

  /// Numbers an invocation. `evaluates`: no backward follows.
  [[nodiscard]] Invocation begin_forward(int unit, bool evaluates = false);
  void pre_forward(const Invocation& use);
  /// `awaits_backward`: a backward of this use will come, so its unit may stay gathered (see Reshard).
  void post_forward(const Invocation& use, bool awaits_backward);
  /// Instead of post_forward() for a forward that threw; does nothing if abandon() was called since.
  void drop_forward(const Invocation& use) noexcept;
  void pre_backward(int unit);
  /// Nothing of the unit is needed any more in this backward. Idempotent.
  void post_backward(int unit);
  /// `grad` is dense, of the whole parameter, in the parameter's or the accumulation dtype; free to reuse on return.
  void grad_ready(int param, ConstTensorView grad);
  /// What this use of the unit had to bring is there, though not of every parameter: it is reduced now, with zeros for
  /// the others. Before the pre_backward() of the next unit: so ranks that leave different parameters out reduce and
  /// gather in one order.
  void end_gradients(int unit);
  /// Whether the parameter's gradient would be the last that its unit awaits in this backward.
  [[nodiscard]] bool completes_unit(int param) const;
  /// True once every trainable parameter of the unit has had its gradient in this backward.
  [[nodiscard]] bool gradients_complete(int unit) const;
  void end_backward();
  /// A forward or backward threw: gives back what it held. A broken backward makes the step be skipped on all ranks.
  void abandon(bool in_backward);

  /// Boundary of a micro-step; on the last one votes and updates. Blocks for all ranks then. Throws kUsage without a
  /// backward since the last step(): on the last micro-step on every rank, naming the first rank that had none, and all
  /// gradients of the step are dropped; else on this rank at once, and nothing has changed. Throws kNonFinite after
  /// max_nonfinite_steps skipped steps in a row, and whatever the transport reports.
  StepResult step();

  /// Forgets the gradients since the last step(), as zero_grad() does in torch. Collective, and blocks for all ranks,
  /// where has_gradients(); else it does nothing. Throws kUsage in the middle of an accumulation, whose earlier
  /// micro-steps are summed already, with nothing changed; kMismatch on every rank if others call step().
  void discard_gradients();
  /// A backward has ended on this rank since the last step().
  [[nodiscard]] bool has_gradients() const noexcept { return had_backward_; }

  /// Whether the backwards from now on bring a gradient of a trainable parameter; at first they do. Units whose
  /// expected gradients are all there are reduced at once. Must be done alike on all ranks, outside backward.
  void expect_gradient(int param, bool expected);
  /// Once before the first batch of an epoch: whoever is still out because the others left an epoch early comes back.
  void begin_epoch();
  /// Before each batch, on all ranks: whether this rank has another one. Collective, blocks. Returns whether to go on
  /// with it, as settings().uneven says where ranks differ. kError: throws kMismatch on all ranks, with nothing
  /// changed. kDrop: false on all. kJoin: true for who has a batch; for who has none this returns false once nobody
  /// has, and takes part meanwhile, with no gradients, in what the others do from batch to batch: forward and backward,
  /// step(), discard_gradients(), average(), barrier(), and shared buffers. A step's gradient is then the mean over the
  /// micro-batches that there were (StepResult::batches), and average() that over the ranks that have one. What needs
  /// all ranks and is none of these throws kUsage there. Ranks out follow one engine.
  [[nodiscard]] bool next_batch(bool has_batch, const JoinedCalls& calls = {});
  /// The same in parts, for front ends that make those calls by themselves: begin_batch(), and join() after each kStep
  /// and kShareBuffers.
  [[nodiscard]] Next begin_batch(bool has_batch);
  [[nodiscard]] Next join();

  /// Changes a group's hyper-parameters from the next update on. Must be done alike on all ranks: the next step throws
  /// kMismatch if not. Throws kUsage for a group that does not exist.
  void set_group(int group, const GroupHyper& hyper);
  /// Learning rate that the next update takes, one a group.
  [[nodiscard]] std::vector<double> learning_rates() const;
  /// Mean over ranks. Blocking, collective. `name` is compared as a barrier's is, and costs a call more on one-sided
  /// transports: without, two averages that one rank makes the other way round are the wrong numbers everywhere.
  [[nodiscard]] double average(double value, std::string_view name = {});
  /// Whole values of a flat (flat.bytes()) as they are now, between steps. Collective; null on ranks that do not want
  /// them. Where the transport is one-sided a rank may call it alone.
  void read_flat(int flat, std::byte* out) { parameters_->read(flat, out); }
  /// Blocks until all ranks are here. `name` is in errors and in the flight recorder, and is compared: ranks in
  /// barriers of different names get kMismatch with both.
  void barrier(std::string_view name = {});
  /// Blocks until all ranks have come to this call, and reduces gradients meanwhile. Must come before every matched
  /// call on communicator() once training has begun: else a rank that is still in backward could wait for one that is
  /// in that call.
  void sync(SyncPoint what, std::string_view name = {});
  /// Runs a call that all ranks make together; such calls may lie in each other. What ends one and is no Error, Ctrl-C
  /// in a wait above all, parts this rank from the others for good: they get kAborted, and so does this rank in every
  /// such call from then on.
  template <class Call>
  decltype(auto) together(Call&& call) {
    require_not_parted();
    try {
      return std::forward<Call>(call)();
    } catch (const Error& error) {
      if (!watch_ || typeid(error) != typeid(Error)) throw;  // a verdict says it already
      throw watch_->dated(error);
    } catch (...) {
      part();
      throw;
    }
  }

  [[nodiscard]] const ModelLayout& layout() const { return layout_; }
  [[nodiscard]] const EngineSettings& settings() const { return settings_; }
  [[nodiscard]] MemoryReport memory_report() const;
  [[nodiscard]] WireBytes planned_wire() const;
  [[nodiscard]] const ParameterStore::Counters& counters() const { return parameters_->counters(); }
  /// Forgets peaks, so that a phase can be measured by itself.
  void reset_peaks();
  [[nodiscard]] std::int64_t committed_steps() const { return committed_steps_; }
  [[nodiscard]] int rank() const { return communicator_.rank(); }
  [[nodiscard]] int world() const { return communicator_.size(); }
  [[nodiscard]] const Communicator& communicator() const { return communicator_; }

 private:
  class Updater;

  void enter(Phase phase, int unit = -1) noexcept;
  [[nodiscard]] std::chrono::nanoseconds waited() const noexcept {
    return watch_ ? watch_->waited() : std::chrono::nanoseconds{0};
  }
  void build_stores();
  /// On a rank that is out, until nobody has a batch, another epoch begins, or the front end is needed.
  [[nodiscard]] Next follow();
  /// Nobody is out any more. All ranks do it at the same place.
  void end_uneven_join();
  void take_part(NextCall call, int what);
  [[nodiscard]] double sum_over_ranks(double value, std::string_view name = {});
  void compare_names(SyncPoint what, std::string_view name);
  StepResult finish_step(bool idle);
  /// All gradients of the step are summed, and all ranks have said what they know of it.
  CommitVote cast_vote(bool idle, bool discards);
  void forget_gradients();
  void require_not_parted() const;
  void part() noexcept;

  std::shared_ptr<RankWatch> watch_;
  int watched_as_ = -1;  ///< RankWatch::add_model()
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
  ModelLayout layout_;
  std::unique_ptr<ModelMemory> memory_;
  std::unique_ptr<ParameterStore> parameters_;
  std::unique_ptr<GradientStore> gradients_;
  std::unique_ptr<Updater> updater_;
  std::unique_ptr<UnevenJoin> uneven_join_;
  std::unique_ptr<UnitUses> uses_;
  std::size_t reported_group_ = 0;  ///< the first group with a trainable parameter: the one of StepResult::lr
  bool parted_ = false;             ///< see together()
  std::uint64_t forward_seq_ = 0;
  int micro_step_ = 0;
  bool had_backward_ = false;
  bool backward_failed_ = false;
  std::int64_t committed_steps_ = 0;
  std::uint64_t construction_peak_ = 0;
};

}  // namespace zeroth
