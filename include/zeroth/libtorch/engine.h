// The engine for native LibTorch trainers.
//
//   auto world  = zeroth::World::from_environment();
//   auto engine = zeroth::libtorch::Engine(model, zeroth::Config::from_file("zero3.json"), world);
//   auto loss = engine.forward(batch);  engine.backward(loss);  auto result = engine.step();
//
// The user's tensors keep their identity: a parameter is the same object before and after, with the same shape; only
// its storage comes and goes. While a parameter is not gathered, every access is an error with its name.
#pragma once

#include <zeroth/engine/config.h>
#include <zeroth/engine/engine.h>
#include <zeroth/engine/world.h>
#include <zeroth/libtorch/model_description.h>
#include <zeroth/libtorch/unit.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::libtorch {

/// Parameters with hyper-parameters of their own. The first group that matches a parameter takes it; what none matches
/// has the configuration's. A frozen parameter in a group may become trainable at any step: its moments and bucket are
/// there from the beginning. A frozen one in no group stays frozen.
struct ParamGroup {
  std::function<bool(const std::string& name, const at::Tensor& parameter)> match{};
  std::optional<double> lr{};
  std::optional<double> weight_decay{};
};

struct EngineOptions {
  std::vector<ParamGroup> groups{};
  LogLevel log_level = LogLevel::kInfo;
  /// Rank 0 says how far training is, at most once in this time; 0: never.
  Milliseconds progress_every{0};
  /// File for the log as JSON lines, see Logger; "": that of the variable ZEROTH_JSON_LOG, if it is set.
  std::string json_log{};
  /// Between a backward and the next forward each `.grad` is not undefined but a guard: full shape, no memory, any
  /// access an error that says where the gradient is. For languages whose habits read gradients, and would find none
  /// without a word.
  bool guard_gradients = false;
  /// For a parameter's name: what tells whether the hooks after accumulation that it had before have anything to do,
  /// asked at each gradient on the thread that runs backward. None: they always run. For languages in which running
  /// even no hook costs a lock.
  std::function<std::function<bool()>(const std::string& name)> earlier_hooks{};
  /// Called with an error that is about to leave a hook of backward. Torch's engine knows its own and Python's
  /// exceptions and passes on the text of all others; so a front end may throw another one here, on the thread that
  /// runs backward.
  std::function<void(const Error&)> rethrow{};
};

/// Bytes received from other ranks since the last reset, counted at the copy.
struct WireReport {
  WireBytes planned_per_step{};      ///< formula of one step
  std::uint64_t all_gather = 0;      ///< gathered parameters, published parameters, gathered gradients
  std::uint64_t reduce_scatter = 0;  ///< gradients
  std::uint64_t between_nodes = 0;   ///< of all payload, what came from ranks on other nodes
  std::uint64_t control = 0;         ///< commit votes, averages, initial values, descriptions of calls
};

/// Everything that does not depend on the model's type. Collective where it says so.
class EngineBase {
 public:
  EngineBase(std::shared_ptr<torch::nn::Module> model, Config config, const World& world, EngineOptions options);
  /// For front ends that run the forward by themselves: around each forward of unit u they keep a UnitScope(runtime(),
  /// u, inputs) and finish() it. Groups are those of the description; `options.groups` holds their hyper-parameters.
  EngineBase(ModelDescription model, Config config, const World& world, EngineOptions options);
  EngineBase(const EngineBase&) = delete;
  EngineBase& operator=(const EngineBase&) = delete;
  EngineBase(EngineBase&&) noexcept;
  EngineBase& operator=(EngineBase&&) noexcept;
  ~EngineBase();

  /// loss.backward() and nothing else; throws kModel if no gradient can flow. Plain loss.backward() does the same.
  void backward(const at::Tensor& loss);
  /// A module has another tensor in the place of a buffer, or none (undefined). `index`: in ModelDescription::buffers.
  /// Alike on all ranks.
  void replace_buffer(std::size_t index, at::Tensor tensor);
  /// It has other buffers altogether. Alike on all ranks.
  void set_buffers(std::vector<NamedBuffer> buffers);
  /// Whether share_buffers() would write to buffers now.
  [[nodiscard]] bool shares_buffers() const;
  /// Rank 0's buffers for all, as zeroth.broadcast_buffers says; before each forward of the whole model in training.
  /// Collective where there are buffers; does nothing without gradients, or inside backward.
  void share_buffers();
  /// The two ends of backward(), for front ends whose language runs it: between them comes loss.backward(), and
  /// fail_backward() instead of the second where that threw. `seen` is what the first returned.
  [[nodiscard]] std::uint64_t open_backward(const at::Tensor& loss);
  void close_backward(std::uint64_t seen);
  void fail_backward();
  /// Boundary of a micro-step; see zeroth::Engine::step(). Collective on the last micro-step.
  StepResult step();
  /// `while (engine.next_batch(batch != loader.end())) { ...; ++batch; }` is a loop over batches in which zeroth.uneven
  /// decides what happens where ranks run out at different times. See zeroth::Engine::next_batch(); begin_epoch() comes
  /// before such a loop. Collective.
  [[nodiscard]] bool next_batch(bool has_batch);
  void begin_epoch();
  /// next_batch() in parts, for front ends with a step() of their own: after each Next::kStep they make it, and then
  /// join().
  [[nodiscard]] Next begin_batch(bool has_batch);
  [[nodiscard]] Next join();
  /// Forgets the gradients since the last step(); see zeroth::Engine::discard_gradients(). Gradients begin anew after
  /// each update by themselves: this is for a batch that is thrown away, and for gradients that another loss left here.
  /// Collective if there are any.
  void zero_grad();
  /// Mean over ranks. Collective, blocks. Where ranks give different names they get kMismatch with both.
  [[nodiscard]] double average(double value, std::string_view name = {});
  /// Collective. Writes all weights and buffers as rank 0 has them, one unit at a time, to a temporary file that is
  /// synced and renamed: `path` is either the old file or the whole new one. Tied weights are written once; the other
  /// names are in the metadata. Throws kIo on every rank.
  void export_safetensors(const std::string& path);

  /// Collective, between steps, the last call before the end: every parameter gets ordinary memory of its own again,
  /// with the values of now. Needs the memory of the whole model on every rank.
  void release_parameters();

  [[nodiscard]] MemoryReport memory_report() const;
  [[nodiscard]] WireReport wire_report() const;
  /// Forgets peaks and traffic, so that a phase can be measured by itself.
  void reset_counters();
  [[nodiscard]] const Config& config() const;
  /// Where the model computes. On a CUDA device the engine keeps and updates everything in host memory, and copies
  /// values there and gradients back.
  [[nodiscard]] c10::Device device() const;
  [[nodiscard]] zeroth::Engine& core();
  [[nodiscard]] int rank() const;
  [[nodiscard]] int world_size() const;

  [[nodiscard]] const std::shared_ptr<Runtime>& runtime() const { return runtime_; }

 private:
  std::shared_ptr<void> owner_;  // the module whose tensors the runtime binds
  std::shared_ptr<Runtime> runtime_;
};

template <class Model>
class Engine : public EngineBase {
 public:
  using Holder = torch::nn::ModuleHolder<Model>;

  /// Collective. `model` has been built alike on all ranks; rank 0's values are everybody's. Wrapped Units become
  /// units, all other parameters the root unit. Throws kModel, kMismatch, kOutOfMemory, kEnvironment before anything is
  /// changed.
  Engine(Holder model, Config config, const World& world, EngineOptions options = {})
      : EngineBase(model.ptr(), std::move(config), world, std::move(options)), model_(std::move(model)) {}

  /// The model's own forward, with the root unit's parameters gathered.
  template <class... Args>
  auto forward(Args&&... args) {
    if (model_->is_training()) share_buffers();
    return run_as_unit(
        runtime(), 0, [this](auto&&... inner) { return model_->forward(std::forward<decltype(inner)>(inner)...); },
        std::forward<Args>(args)...);
  }
  [[nodiscard]] Holder& model() { return model_; }

 private:
  Holder model_;
};

template <class Holder>
Engine(Holder, Config, const World&) -> Engine<typename Holder::ContainedType>;
template <class Holder>
Engine(Holder, Config, const World&, EngineOptions) -> Engine<typename Holder::ContainedType>;

}  // namespace zeroth::libtorch
