// The engine for native LibTorch trainers.
//
//   auto world  = zeroth::World::from_environment();
//   auto engine = zeroth::libtorch::Engine(model, zeroth::Config::from_file("zero3.json"), world);
//   auto loss = engine.forward(batch);  engine.backward(loss);  auto result = engine.step();
//
// The user's tensors stay the same objects with the same shapes; the engine replaces only their storage. While a
// parameter is not gathered, every access to it is an error with its name. When the engine goes, the model has no
// values, at every stage, unless release_parameters() was its last call.
#pragma once

#include <zeroth/engine/config.h>
#include <zeroth/engine/engine.h>
#include <zeroth/engine/local_updates.h>
#include <zeroth/engine/world.h>
#include <zeroth/libtorch/model_description.h>
#include <zeroth/libtorch/unit.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

/// Parameters with their own hyper-parameters. The first group that matches a parameter takes it. Parameters without a
/// match use the configuration's values. A frozen parameter in a group has moments and a bucket from the beginning, so
/// it may become trainable at any step. A frozen parameter in no group stays frozen.
struct ParamGroup {
  std::function<bool(const std::string& name, const at::Tensor& parameter)> match{};
  std::optional<double> lr{};
  std::optional<double> weight_decay{};
  std::optional<std::array<double, 2>> betas{};  ///< AdamW, Adam
  std::optional<double> eps{};                   ///< AdamW, Adam
  std::optional<double> momentum{};              ///< SGD
  std::optional<double> dampening{};             ///< SGD
  std::optional<bool> nesterov{};                ///< SGD
};

/// What the group says of itself, and `otherwise` for the rest.
[[nodiscard]] GroupHyper hyper_of(const ParamGroup& group, GroupHyper otherwise);

/// Whose calls the hints of errors name.
enum class FrontEnd : std::uint8_t { kCpp, kPython };

struct EngineOptions {
  std::vector<ParamGroup> groups{};
  /// Frozen parameters, in a group or not, that may become trainable later: as a frozen parameter in a group they have
  /// moments and a bucket from the beginning. Unset: none.
  std::function<bool(const std::string& name, const at::Tensor& parameter)> trainable_later{};
  /// Initial values of a parameter that has none yet: a dense tensor on the CPU, with the parameter's sizes, strides
  /// and dtype; undefined for parameters that have theirs. Called while the engine is built, unit by unit, and each
  /// unit's values are dropped when they are sharded. The parameter's own memory is not read then.
  std::function<at::Tensor(const std::string& name)> initial_value{};
  /// What a rank's parameter is of the whole model's, in the place of what its module says (SplitModule). Unset, or
  /// none: that.
  std::function<std::optional<ParameterBox>(const std::string& name, const at::Tensor& parameter)> box_of{};
  LogLevel log_level = LogLevel::kInfo;
  /// Shortest time between two progress lines of rank 0; 0: no such lines.
  Milliseconds progress_every{0};
  /// Path of the log as JSON lines, see Logger; "": the path in the variable ZEROTH_JSON_LOG, if it is set.
  std::string json_log{};
  /// How other units are made, in the front end's language: logged where most of the model is in the root unit.
  std::string units_hint{};
  /// True: between a backward and the next forward each `.grad` is a guard instead of undefined. A guard has the full
  /// shape and no memory, and any access is an error that says where the gradient is. For languages in which programs
  /// often read gradients.
  bool guard_gradients = false;
  /// Axes of zeroth.mesh along which ranks are given the same tensors. Each Engine::forward(), and each call of a
  /// PipelineEngine with micro-batches, compares these by their form and a digest, and throws kMismatch on all such
  /// ranks where they differ. Add "sp" where the forward takes whole sequences and cuts them itself. All ranks give the
  /// same axes.
  std::vector<std::string> same_batches{"pp", "tp"};
  FrontEnd front_end = FrontEnd::kCpp;
  /// Takes a parameter's name and returns a function that is true if the parameter's earlier hooks after accumulation
  /// have work. The function runs at each gradient on the backward thread. Unset: these hooks always run. For languages
  /// in which running hooks costs a lock even if there are none.
  std::function<std::function<bool()>(const std::string& name)> earlier_hooks{};
  /// Called on the backward thread with an error that is about to leave a hook of backward. Torch's engine passes its
  /// own and Python's exceptions on, and only the text of all others. So a front end may throw another exception here.
  std::function<void(const Error&)> rethrow{};
};

/// Bytes that this rank received from other ranks since the last reset, counted at the copy.
struct WireReport {
  WireBytes planned_per_step{};      ///< formula of one step
  std::uint64_t all_gather = 0;      ///< gathered parameters, published parameters, gathered gradients
  std::uint64_t reduce_scatter = 0;  ///< gradients, or the messages in their place
  std::uint64_t between_nodes = 0;   ///< part of the payload from ranks on other nodes
  std::uint64_t between_sites = 0;   ///< local updates, beside the others
  std::uint64_t control = 0;         ///< commit vote, averages, initial values, descriptions of calls
};

using NamedTensor = std::pair<std::string, at::Tensor>;

/// A rank's part of a state.
struct LocalState {
  std::string name{};
  at::Tensor values{};  ///< of one dimension, on the CPU: a copy
  BoxRange range{};     ///< of the logical tensor, in the parameter's memory order
};

/// What load_state_dict() found.
struct WeightReport {
  std::vector<std::string> missing{};     ///< names of the model that were not given: their values stay
  std::vector<std::string> unexpected{};  ///< names that the model does not have
};

/// Why a tensor that stands for a parameter or a gradient has no memory now, in a sentence, for who prints it; "" for
/// another tensor. Reads no values.
[[nodiscard]] std::string why_without_memory(const at::Tensor& tensor);
/// Throws the same as an error if `storage` is that of such a tensor. For readers that torch's operators do not see.
void require_memory(const at::Storage& storage);

class RankGroup;

/// The part of the engine that does not depend on the model's type. One thread at a time.
class EngineBase {
 public:
  EngineBase(std::shared_ptr<torch::nn::Module> model, Config config, const World& world, EngineOptions options);
  /// For front ends that run the forward themselves: around each forward of unit u they make a UnitScope(runtime(), u)
  /// and finish() it. The description gives the groups; `options.groups` holds their hyper-parameters. Collective,
  /// blocks.
  EngineBase(ModelDescription model, Config config, const World& world, EngineOptions options);
  EngineBase(const EngineBase&) = delete;
  EngineBase& operator=(const EngineBase&) = delete;
  EngineBase(EngineBase&&) noexcept;
  EngineBase& operator=(EngineBase&&) noexcept;
  ~EngineBase();

  /// Runs loss.backward(); calling loss.backward() directly is the same. May block for other ranks. Throws kModel if
  /// `loss` does not require a gradient.
  void backward(const at::Tensor& loss);
  /// A term of the loss that every rank computes whole from weights, such as a penalty on them: `engine.backward(loss +
  /// engine.part_of_loss(penalty))`. The same value; the gradient is divided where gradients of ranks are summed that
  /// all compute it: over those that share sequences, and of some parameters over those that share matrices. Does
  /// nothing on other meshes. For terms of tokens see part_of_loss() in zeroth/libtorch/loss_terms.h. Throws kUsage for
  /// a term of what the forward gave, where ranks share sequences.
  [[nodiscard]] at::Tensor part_of_loss(const at::Tensor& term) const;
  /// Gathers the units of these parameters for code that reads them outside of their units' forwards: a loss that is
  /// fused with the head's product, a penalty on weights. Gradients flow through what is computed with them, and their
  /// backward gathers the units again. Returns an object that gives them back: `auto weights = engine.gathered({w});
  /// ...; weights.finish();`. May block for other ranks, and where gathers are collective all ranks must make the call.
  /// Does nothing to parameters that are whole on every rank. Throws kUsage for other tensors.
  ///
  /// With `writers` the parameters may be written in place until finish(), under NoGradGuard; what rank `writers.rank`
  /// wrote, or all ranks alike, becomes the value on all ranks, masters included. An element that does not change keeps
  /// its master to the bit. Between steps; needs memory for the parameters once more where they are written.
  /// Collective.
  [[nodiscard]] Gathered gathered(const std::vector<at::Tensor>& parameters, Writers writers = {}) {
    return {runtime_, parameters, writers};
  }
  /// The whole tensor of a state on the CPU: a copy. `name`: of state_dict(), tied names included. `kind`, and errors:
  /// see zeroth::StateQuery and Engine::read_states(). `ranks`: that want it, empty: all; undefined on the others, and
  /// for a gradient that no rank has. Collective, blocks.
  [[nodiscard]] at::Tensor full(const std::string& name, const std::string& kind = "param",
                                const std::vector<int>& ranks = {});
  /// The same for several parameters, one after the other: take(name, tensor) is called on `ranks`. Empty `names`: all
  /// that have the state.
  void read_states(const StateQuery& query, const std::function<void(const std::string& name, at::Tensor)>& take);
  /// Values that this rank has of a state. Without communication.
  [[nodiscard]] std::vector<LocalState> local(const std::string& kind = "param") const;
  /// Replaces weights, masters and persistent buffers on all ranks by rank 0's `values`, by the names of state_dict();
  /// other ranks' are not looked at. Other states stay. `strict`: throws kModel for names that are missing or too many.
  /// Collective, blocks; between steps. Throws on every rank alike, with nothing changed: kModel for another shape or
  /// dtype; kUsage.
  WeightReport load_state_dict(const std::vector<NamedTensor>& values, bool strict = true);
  /// The same where every rank has the values, as tensors over mapped files: each rank reads only the elements that it
  /// keeps. `failure`: why this rank has none, "" if it has; then all ranks throw kIo with it. Throws kMismatch if
  /// ranks have other names, shapes or dtypes.
  WeightReport load_mapped(const std::vector<NamedTensor>& values, bool strict = true, const std::string& failure = "");
  /// Begins local updates with the other sites of the world that the engine was made in (World::site()). From now on
  /// step() makes the exchanges. Buffers of the model stay each site's own. Collective over all sites, blocks, between
  /// steps. Throws the errors of LocalUpdates::attach().
  void local_updates(const LocalSettings& settings);
  /// Throws kUsage without local updates.
  [[nodiscard]] LocalReport local_report() const;
  /// Averages of weights on shards: see zeroth::Engine.
  void add_average(const std::string& name);
  void update_average(const std::string& name, double decay);
  void swap_average(const std::string& name);
  /// Call it if a module has replaced a buffer by another tensor, or removed it (undefined tensor). `index`: position
  /// in ModelDescription::buffers. All ranks must make the same change.
  void replace_buffer(std::size_t index, at::Tensor tensor);
  /// Replaces the whole list of buffers. All ranks must make the same change.
  void set_buffers(std::vector<NamedBuffer> buffers);
  /// True if share_buffers() would write to buffers now.
  [[nodiscard]] bool shares_buffers() const;
  /// True if the step() that ends an update will write to buffers: running statistics, which are rank 0's on every rank
  /// then.
  [[nodiscard]] bool step_shares_buffers() const;
  /// Copies rank 0's buffers to all ranks, if zeroth.broadcast_buffers is true. Call it before each forward of the
  /// whole model in training. Collective and blocking if there are buffers. Does nothing without gradients or inside
  /// backward.
  void share_buffers();
  /// backward() in parts, for front ends whose language runs loss.backward(): open_backward(), loss.backward(),
  /// close_backward(). If loss.backward() threw, call fail_backward() instead of close_backward(). `seen`: the value
  /// that open_backward() returned.
  [[nodiscard]] std::uint64_t open_backward(const at::Tensor& loss);
  void close_backward(std::uint64_t seen);
  void fail_backward();
  /// The gradient that loss.backward() begins with between open_backward() and close_backward(): `gradient`, or ones,
  /// times the loss scale. Undefined where torch's own ones do.
  [[nodiscard]] at::Tensor first_gradient(const at::Tensor& loss, const at::Tensor& gradient) const;
  /// Ends a micro-step; see zeroth::Engine::step(). Collective and blocking on the last micro-step.
  StepResult step();
  /// For loops in which ranks may have different numbers of batches; zeroth.uneven decides what happens then:
  /// `engine.begin_epoch(); while (engine.next_batch(batch != loader.end())) { ...; ++batch; }`. Collective, blocks.
  /// See zeroth::Engine::next_batch().
  [[nodiscard]] bool next_batch(bool has_batch);
  void begin_epoch();
  /// next_batch() in parts, for front ends with their own step(): after each Next::kStep they call it and then join().
  [[nodiscard]] Next begin_batch(bool has_batch);
  [[nodiscard]] Next join();
  /// Updates now with the micro-steps that there were since the last update, as at the end of an epoch with an odd
  /// number of batches; see zeroth::Engine::end_accumulation(). Collective, blocks.
  StepResult end_accumulation();
  /// Drops the gradients since the last update; see zeroth::Engine::discard_gradients(). Not needed after an update: it
  /// is for a dropped batch, and for gradients of another loss. Collective and blocking if there are gradients.
  void zero_grad();
  /// See zeroth::Engine::flush_update(). Collective, blocks.
  void flush_update();
  /// Mean of `value` over the ranks. Collective, blocks. Throws kMismatch, with both names, if ranks give different
  /// names.
  [[nodiscard]] double average(double value, std::string_view name = {});
  /// Collective, blocks. Rank 0 writes all weights and its buffers, one unit at a time, to a temporary file, which is
  /// synced and renamed. So `path` is either the old file or the whole new one. Tied weights are written once; their
  /// other names are in the metadata. Throws kIo on every rank.
  void export_safetensors(const std::string& path);
  /// Collective, blocks. Writes all states, and rank 0's persistent buffers, as a checkpoint into `folder`; returns its
  /// path. See zeroth::Engine::save(). `options.extras` may name further tensors of rank 0.
  std::string save(const std::string& folder, SaveOptions options = {});
  /// save() behind the training; see zeroth::Engine::save_async().
  SaveHandle save_async(const std::string& folder, SaveOptions options = {});
  /// Collective, blocks. Brings the states and buffers of a checkpoint; see zeroth::Engine::load(). A buffer that is
  /// not there keeps its values and is in `missing`. `options.names`: names of the checkpoint, each with the one that
  /// the model has; the other way round is taken where it can be told apart.
  LoadReport load(const std::string& path, const LoadOptions& options = {});

  /// Gives every parameter ordinary memory with the current values, so that the model outlives the engine. Collective,
  /// blocks; the last call on the engine, between steps. Needs memory for the whole model on every rank.
  void release_parameters();

  /// `construction_peak` includes values that EngineOptions::initial_value has made, at most a unit's at once.
  [[nodiscard]] MemoryReport memory_report() const;
  [[nodiscard]] WireReport wire_report() const;
  /// Resets peaks and traffic counters, to measure a phase by itself.
  void reset_counters();
  [[nodiscard]] const Config& config() const;
  /// A floating-point tensor in the dtype of fp16.auto_cast or bf16.auto_cast, or the tensor itself.
  [[nodiscard]] at::Tensor cast_input(at::Tensor input) const;
  /// The device on which the model computes. If it is a CUDA device, the engine stores and updates its state in host
  /// memory, copies parameters to the device and gradients back.
  [[nodiscard]] c10::Device device() const;
  [[nodiscard]] zeroth::Engine& core();
  [[nodiscard]] int rank() const;
  [[nodiscard]] int world_size() const;

  [[nodiscard]] const std::shared_ptr<Runtime>& runtime() const { return runtime_; }

 protected:
  /// Ranks that share the model have one batch: see EngineOptions::same_batches.
  [[nodiscard]] bool compares_batches() const { return batch_ranks_ != nullptr; }
  /// Throws kMismatch on all of these ranks. Collective over them, blocks.
  void require_same_batch(const std::vector<NamedTensor>& tensors) const;

 private:
  std::shared_ptr<void> owner_;  // the module whose tensors the runtime binds
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<const RankGroup> batch_ranks_{};  // null: nothing is compared
};

template <class Model>
class Engine : public EngineBase {
 public:
  using Holder = torch::nn::ModuleHolder<Model>;

  /// Collective, blocks. `model` must have the same structure on all ranks; rank 0's values are copied to all. The
  /// engine shares the model. Wrapped Units become units; all other parameters belong to the root unit. Throws kModel,
  /// kMismatch, kOutOfMemory and kEnvironment before it changes anything.
  Engine(Holder model, Config config, const World& world, EngineOptions options = {})
      : EngineBase(model.ptr(), std::move(config), world, std::move(options)), model_(std::move(model)) {}

  /// Calls the model's own forward with the root unit's parameters gathered. May block for other ranks. Tensors, and
  /// vectors of them, are cast as fp16.auto_cast and bf16.auto_cast say. Ranks that share the model give it the same
  /// arguments: see EngineOptions::same_batches.
  template <class... Args>
  auto forward(Args&&... args) {
    if (compares_batches()) {
      std::vector<NamedTensor> inputs;
      (take_inputs(args, inputs), ...);
      require_same_batch(inputs);
    }
    if (model_->is_training()) share_buffers();
    return run_as_unit(
        runtime(), 0, [this](auto&&... inner) { return model_->forward(std::forward<decltype(inner)>(inner)...); },
        as_input(std::forward<Args>(args))...);
  }
  [[nodiscard]] Holder& model() { return model_; }

 private:
  template <class T>
  static void take_inputs(const T& value, std::vector<NamedTensor>& inputs) {
    detail::for_tensors_in<false>(value, [&inputs](const at::Tensor& tensor) {
      inputs.emplace_back("tensor " + std::to_string(inputs.size()), tensor);
    });
  }
  template <class T>
  decltype(auto) as_input(T&& value) const {
    if constexpr (std::is_same_v<std::remove_cvref_t<T>, at::Tensor>) {
      return cast_input(std::forward<T>(value));
    } else if constexpr (std::is_same_v<std::remove_cvref_t<T>, std::vector<at::Tensor>>) {
      std::vector<at::Tensor> inputs = std::forward<T>(value);
      for (at::Tensor& input : inputs) input = cast_input(std::move(input));
      return inputs;
    } else {
      return std::forward<T>(value);
    }
  }

  Holder model_;
};

template <class Holder>
Engine(Holder, Config, const World&) -> Engine<typename Holder::ContainedType>;
template <class Holder>
Engine(Holder, Config, const World&, EngineOptions) -> Engine<typename Holder::ContainedType>;

}  // namespace zeroth::libtorch
