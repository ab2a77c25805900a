// Runtime: turns LibTorch's hooks into the five events of the core engine. One a LibTorch engine.
#pragma once

#include "libtorch/buffers.h"
#include "libtorch/demand_reads.h"
#include "libtorch/gradient_guards.h"
#include "libtorch/gradient_level.h"
#include "libtorch/gradient_widths.h"
#include "libtorch/loss_scale.h"
#include "libtorch/loss_terms.h"
#include "libtorch/slots.h"
#include "libtorch/step_log.h"
#include "libtorch/unit_backwards.h"

#include <zeroth/base/deadline.h>
#include <zeroth/engine/world.h>
#include <zeroth/libtorch/engine.h>
#include <zeroth/libtorch/model_description.h>

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

class Runtime final : public ValueSource, public std::enable_shared_from_this<Runtime> {
 public:
  /// Makes the core engine, brings rank 0's values and installs the hooks. Collective.
  static std::shared_ptr<Runtime> create(ModelDescription model, Config config, const World& world,
                                         EngineOptions options);
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  ~Runtime() override;

  [[nodiscard]] bool bring(const std::vector<int>& params, const Storages& used) override;
  void attach(int param, const at::Tensor& alias) override { slots_.attach(param, alias); }
  /// A forward ends: gives back the units that it has read beside its own.
  void end_reads(const UnitUse& use) { reads_.close(use); }

  [[nodiscard]] std::shared_ptr<UnitUse> begin(int unit, UnitScope::Kind kind);
  /// A forward of a part of the model begins: what begin() of the root unit does without taking its parameters. The
  /// loss scale enters and leaves by the caller's hand.
  void begin_part();
  void end_part() noexcept;
  /// In the backwards that follow, nodes read no parameters: none are gathered for them.
  void set_reads_parameters(bool reads) { reads_parameters_ = reads; }
  /// What the forward takes in place of a tensor that is handed over to it.
  [[nodiscard]] at::Tensor follow_input(const UnitUse& use, const at::Tensor& input);
  /// Before end(): the forward's outputs get the loss scale.
  void end_scale(const UnitUse& use, const std::vector<at::Tensor>& outputs);
  [[nodiscard]] bool scales_loss() const { return config_.fp16.enabled; }
  [[nodiscard]] LossScale& loss_scale() { return *loss_scale_; }
  /// The factor of gradients inside a forward, see GradientLevel; 1 without fp16.
  [[nodiscard]] double scale_inside() const { return scales_loss() ? core_->loss_scale() : 1.0; }
  [[nodiscard]] bool is_own_process() const { return ::getpid() == owner_; }
  /// In the backward that runs a gradient has entered a forward through a node of LossScale.
  void enter_scaled();
  [[nodiscard]] bool was_entered() const;
  [[nodiscard]] bool in_backward() const { return in_backward_; }
  /// "" for another tensor.
  [[nodiscard]] std::string name_of_parameter(const at::Tensor& tensor) const;
  [[nodiscard]] bool is_parameter(const at::Tensor& tensor) const { return !name_of_parameter(tensor).empty(); }
  /// A gradient gets into a forward without the scale: by a parameter, or, for "", by a tensor. Backward throws it.
  void refuse_entry(const std::string& parameter) noexcept;
  /// A gradient gets out of a forward with the scale, to a node with this name. Backward throws it.
  void refuse_exit(const std::string& node) noexcept;
  /// A leaf gets gradients with the scale and without. Backward throws it.
  void refuse_both_levels(const at::Tensor& leaf) noexcept;
  /// The gradient with which backward(loss) begins: `gradient`, or ones, times the scale. Undefined: torch's own.
  [[nodiscard]] at::Tensor first_gradient(const at::Tensor& loss, const at::Tensor& gradient) const;
  void require_unwritten(int unit) const { slots_.require_unwritten(unit); }  ///< since begin()
  void forget_writes(int unit) { slots_.forget_writes(unit); }
  struct Ended {
    bool awaits_backward = false;  ///< nodes were made
    bool through_outputs = false;  ///< some of them are behind the outputs, and hold the use
  };
  void end(const std::shared_ptr<UnitUse>& use, Ended ended);
  void drop(const UnitUse& use) noexcept;  ///< instead of end(), for a forward that failed
  void replace_buffer(std::size_t index, at::Tensor tensor) { model_.buffers.at(index).tensor = std::move(tensor); }
  void set_buffers(std::vector<NamedBuffer> buffers) { model_.buffers = std::move(buffers); }
  void set_buffer_owners(std::map<std::string, int> owners) { model_.buffer_owners = std::move(owners); }
  [[nodiscard]] bool shares_buffers() const;  ///< share_buffers() would
  [[nodiscard]] bool step_shares_buffers() const;
  /// Collective: rank 0's values of what has changed since the last call.
  void share_statistics();
  /// Collective where there are buffers: before a forward of the whole model that trains.
  void share_buffers();
  /// The node numbered `node`, which the use's forward made, is about to run: gathers the unit's parameters, and gives
  /// those of the units back that are over. May block for other ranks.
  void before_backward(const std::shared_ptr<UnitUse>& use, std::uint64_t node);
  /// The same from where nothing can be thrown: the next hook, or the end of backward, throws the error.
  void before_node(const std::shared_ptr<UnitUse>& use, std::uint64_t node) noexcept;
  void gradient(int param, const at::Tensor& parameter);
  /// A backward is still open after its call returned: it threw. Ends it.
  void settle();
  /// A backward threw, perhaps before it came to the model: the step is skipped on all ranks. Throws the error of
  /// before_node(), if there was one: what backward threw is only what came of it.
  void fail_backward();
  /// Runs the body of a hook of backward; see EngineOptions::rethrow.
  template <class Body>
  void in_hook(const Body& body) const {
    try {
      // Torch runs the nodes of a GPU on a thread of their own, and those of the CPU on the caller's.
      const std::lock_guard lock(hooks_);
      if (deferred_) std::rethrow_exception(std::exchange(deferred_, nullptr));
      body();
    } catch (const Error& error) {
      if (rethrow_) rethrow_(error);
      throw;
    }
  }

  void backward(const at::Tensor& loss);
  [[nodiscard]] std::uint64_t open_backward(const at::Tensor& loss);
  void close_backward(std::uint64_t seen);
  [[nodiscard]] at::Tensor part_of_loss(const at::Tensor& term) const;
  /// open_backward() of a part of the model, whose first gradients have the loss scale already. `uses`: of its graph,
  /// if counts_uses(); null: those of all graphs. It must live until the end of the backward.
  [[nodiscard]] std::uint64_t open_backward_of_part(const GradientUses* uses = nullptr);
  /// Whether parameters have gradients whose width depends on their uses.
  [[nodiscard]] bool counts_uses() const { return widths_.any(); }
  void release_parameters();
  StepResult step() { return end_step(StepEnd::kMicroStep); }
  /// Ends all micro-steps at once, see zeroth::Engine::step_all().
  StepResult step_all() { return end_step(StepEnd::kAll); }
  /// See zeroth::Engine::end_accumulation().
  StepResult end_accumulation() { return end_step(StepEnd::kShort); }
  /// Never kShareBuffers.
  [[nodiscard]] Next begin_batch(bool has_batch);
  [[nodiscard]] Next join() { return core_->join(); }
  void discard_gradients();
  void flush_update();
  void export_safetensors(const std::string& path);
  std::string save(const std::string& folder, SaveOptions options);
  SaveHandle save_async(const std::string& folder, SaveOptions options);
  LoadReport load(const std::string& path, const LoadOptions& options);
  void read_states(const StateQuery& query, const std::function<void(const std::string& name, at::Tensor)>& take);
  [[nodiscard]] std::vector<LocalState> local_states(const std::string& kind);
  struct WeightLoad {
    bool strict = true;
    bool everywhere = false;  ///< every rank has the values; else rank 0
    std::string failure{};    ///< why this rank has none
  };
  WeightReport load_weights(const std::vector<NamedTensor>& values, const WeightLoad& how);
  void add_local_updates(const LocalSettings& settings);
  [[nodiscard]] LocalReport local_report() const;
  void add_average(const std::string& name);
  void update_average(const std::string& name, double decay);
  void swap_average(const std::string& name);
  /// For Gathered. Throws kUsage where weights cannot be written now.
  void require_writable(Writers writers);
  /// Numbers of parameters, each once.
  [[nodiscard]] std::vector<int> params_of(const std::vector<at::Tensor>& parameters) const;
  /// Copies of the values that gathered parameters have.
  [[nodiscard]] std::vector<at::Tensor> values_of(const std::vector<int>& params) const;
  /// Puts `before` back into gathered parameters, and returns what was written over it: undefined where nothing was.
  [[nodiscard]] std::vector<at::Tensor> take_back(const std::vector<int>& params,
                                                  const std::vector<at::Tensor>& before);
  /// Collective: makes `written` the values on all ranks. `failure`: why this rank cannot; then all throw, as they do
  /// if a rank wrote that must not.
  void write_edits(const std::vector<int>& params, const std::vector<at::Tensor>& written, Writers writers,
                   const std::exception_ptr& failure);
  /// Calls that gave parameters other values than those of training: of load() and load_weights().
  [[nodiscard]] std::uint64_t loads() const { return loads_; }
  [[nodiscard]] const Logger& log() const { return log_; }
  [[nodiscard]] WireReport wire_report() const;
  void reset_counters();
  [[nodiscard]] zeroth::Engine& core() {
    require_own_process();
    return *core_;
  }
  [[nodiscard]] const Config& config() const { return config_; }
  [[nodiscard]] MemoryReport memory_report() const;
  /// See StepLog.
  void note_experts(double entropy, std::string layer, std::int64_t dropped) {
    step_log_.note_experts(entropy, std::move(layer), dropped);
  }
  [[nodiscard]] c10::Device device() const { return slots_.device(); }
  /// The units that hold these parameters, in order, each once. Throws kUsage for another tensor.
  [[nodiscard]] std::vector<int> units_of(const std::vector<at::Tensor>& parameters) const;

 private:
  /// Adds the buffers to `options`; they must live until the save has read them.
  [[nodiscard]] std::vector<at::Tensor> prepare_save(SaveOptions& options);
  Runtime(Config config, ModelDescription model);
  void give_parameters_back();
  void meet_for_buffers();
  /// What the user has written to parameters counts from now on, wherever their values lie; throws kModel where it is
  /// lost.
  void take_writes();
  /// Ranks compare these in the call that comes, see zeroth::Engine::set_writes().
  void note_writes(ParameterSlots::Digests which);
  /// Weights have new values on all ranks: copies, versions.
  void take_new_weights();
  /// Numbers of the parameters, but for those with these names.
  [[nodiscard]] std::vector<int> params_without(const std::vector<std::string>& names) const;
  void require_all_ours() const;
  /// Calls of all ranks that this front end adds to the core engine's.
  void add_operations();
  void announce(const World& world) const;
  /// Throws kConfig if the program has made groups for sharing models along another mesh than the configuration's.
  void require_same_mesh(const World& world) const;
  /// Where ranks are in the mesh, and what is sharded over which.
  void announce_mesh() const;
  /// Throws kUsage in a forked child: memory and transport belong to the process that made the engine.
  void require_own_process() const;
  /// Tells the core which parameters get gradients now. Throws kModel for one that was frozen for good and now wants
  /// one.
  void look_at_trainability();
  /// Warns once of a term that counts several times.
  void look_at_terms(const at::Tensor& loss);
  void install_hooks(const EngineOptions& options);
  [[nodiscard]] LoadOptions by_own_names(LoadOptions options) const;
  void leave_forward(const UnitUse& use) noexcept;
  /// bring() where a node of a backward reads: a function of the user's own that saved a weight of another unit.
  /// Autograd numbers such a node before the function's own forward runs, so it comes before the nodes of that read.
  /// False if no forward of the engine made the node that runs.
  [[nodiscard]] bool bring_to_node(const std::vector<int>& units);
  /// Backward throws it, if there is none before.
  void defer(Error error) noexcept;
  void enter_depth();
  void leave_depth() noexcept;
  void enter_backward();
  void leave_backward();
  [[nodiscard]] std::uint64_t open_backward_of(const GradientUses* uses);
  enum class StepEnd : std::uint8_t { kMicroStep, kAll, kShort };
  StepResult end_step(StepEnd which);

  Config config_;
  ModelDescription model_;
  Logger log_;
  const Words* words_ = &kCppWords;  ///< of hints
  std::function<void(const Error&)> rethrow_;
  mutable std::mutex hooks_;
  mutable std::exception_ptr deferred_;  ///< of before_node()
  int explained_unit_ = -1;              ///< whose parameters tell of that error when they are read
  std::unique_ptr<Device> device_;
  std::shared_ptr<TrafficTable> traffic_;
  std::optional<World> world_;
  std::shared_ptr<TrafficTable> across_traffic_ = std::make_shared<TrafficTable>();
  ParameterSlots slots_;
  DemandReads reads_{slots_};
  std::set<int> read_units_;  ///< of which the log has said that they are read by others
  std::unique_ptr<zeroth::Engine> core_;
  OperationId share_buffers_{};
  OperationId export_{};
  OperationId close_{};
  OperationId load_weights_{};
  OperationId edit_{};
  UnitBackwards backwards_;
  std::vector<int> trainable_;
  GradientWidths widths_{slots_};
  std::uint64_t loads_ = 0;
  const GradientUses* uses_ = nullptr;  ///< of the part whose backward runs
  GradientGuards guards_{slots_, model_, trainable_};
  StepLog step_log_{log_};
  std::unique_ptr<LossScale> loss_scale_;
  std::unique_ptr<LossTerms> loss_terms_;
  bool told_of_term_ = false;  ///< that counts several times
  std::map<const at::TensorImpl*, int> trainable_by_tensor_;
  std::optional<LevelScope> backward_level_;   ///< while backward() runs
  std::optional<LevelScope> forward_level_;    ///< while depth_ is above 0
  std::atomic<int> entered_in_{-1};            ///< the last backward whose gradients entered a forward by LossScale
  int depth_ = 0;                              ///< forwards that are open
  std::vector<std::uint64_t> buffer_digests_;  ///< of the end of the last step
  bool in_backward_ = false;
  bool reads_parameters_ = true;
  bool evaluates_ = false;  ///< the last forward of the whole model was one without gradients
  pid_t owner_;
};

}  // namespace zeroth::libtorch
