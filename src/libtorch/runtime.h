// Runtime: turns LibTorch's hooks into the five events of the core engine. One a LibTorch engine.
#pragma once

#include "libtorch/slots.h"

#include <zeroth/base/deadline.h>
#include <zeroth/engine/world.h>
#include <zeroth/libtorch/engine.h>
#include <zeroth/libtorch/model_description.h>

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

namespace zeroth::libtorch {

/// What a hook says when compiled autograd asks how to compile it. Throws kModel.
[[noreturn]] void refuse_compiled_autograd();

/// One forward of a unit, as its backward sees it.
struct UnitUse {
  Invocation invocation{};
  /// An input that needs a gradient.
  struct Input {
    int senders = 0;       ///< nodes of the unit that hand it one
    int senders_left = 0;  ///< of them, those that have not yet run in the backward `active_in`
    bool done = false;     ///< in that backward
  };
  std::vector<Input> inputs{};
  bool open_ended = false;       ///< nothing tells when the unit's backward is over
  bool computed_again = false;   ///< for a checkpoint, in backward
  std::uint64_t first_node = 0;  ///< autograd's number of the first node that the forward could make
  std::uint64_t last_begun = 0;  ///< number of the forward of a unit that began last before this one ended
  std::uint64_t active_in = 0;   ///< backward in which the outputs' nodes ran
  int inputs_left = 0;           ///< inputs that are not done in that backward
};

class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  /// Makes the core engine, brings rank 0's values and installs the hooks. Collective.
  static std::shared_ptr<Runtime> create(ModelDescription model, Config config, const World& world,
                                         EngineOptions options);
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  ~Runtime();

  [[nodiscard]] std::shared_ptr<UnitUse> begin(int unit);
  void require_unwritten(int unit) const { slots_.require_unwritten(unit); }  ///< since begin()
  void end(const std::shared_ptr<UnitUse>& use, bool awaits_backward);
  void drop(const UnitUse& use) noexcept;  ///< instead of end(), for a forward that failed
  void replace_buffer(std::size_t index, at::Tensor tensor) { model_.buffers.at(index).tensor = std::move(tensor); }
  void set_buffers(std::vector<NamedBuffer> buffers) { model_.buffers = std::move(buffers); }
  [[nodiscard]] bool shares_buffers() const;  ///< share_buffers() would
  /// Collective where there are buffers: before a forward of the whole model that trains.
  void share_buffers();
  void before_backward(UnitUse& use);                 ///< the nodes of the unit's outputs are about to run
  void input_sent(UnitUse& use, std::size_t input);   ///< a node of the unit that hands the input a gradient has run
  void input_whole(UnitUse& use, std::size_t input);  ///< the input has all of its gradient
  void gradient(int param, const at::Tensor& parameter);
  /// Whether no parameter of the unit can be read after the last gradient of its own parameters.
  [[nodiscard]] bool ends_with_gradients(int unit) const;
  /// A backward is still open after its call returned: it threw. Ends it.
  void settle();
  /// A backward threw, perhaps before it came to the model: the step is skipped on all ranks.
  void fail_backward();
  /// Runs the body of a hook of backward; see EngineOptions::rethrow.
  template <class Body>
  void in_hook(const Body& body) const {
    try {
      // Torch runs the nodes of a GPU on a thread of their own, and those of the CPU on the caller's.
      const std::lock_guard lock(hooks_);
      body();
    } catch (const Error& error) {
      if (rethrow_) rethrow_(error);
      throw;
    }
  }

  void backward(const at::Tensor& loss);
  [[nodiscard]] std::uint64_t open_backward(const at::Tensor& loss);
  void close_backward(std::uint64_t seen);
  void release_parameters();
  StepResult step();
  /// Never kShareBuffers.
  [[nodiscard]] Next begin_batch(bool has_batch);
  [[nodiscard]] Next join();
  void discard_gradients();
  void export_safetensors(const std::string& path);
  [[nodiscard]] WireReport wire_report() const;
  void reset_counters();
  [[nodiscard]] zeroth::Engine& core() {
    require_own_process();
    return *core_;
  }
  [[nodiscard]] const Config& config() const { return config_; }
  [[nodiscard]] MemoryReport memory_report() const;
  [[nodiscard]] c10::Device device() const { return slots_.device(); }
  [[nodiscard]] bool has_parameter(const at::Tensor& tensor) const {
    return parameters_.contains(tensor.unsafeGetTensorImpl());
  }

 private:
  Runtime(Config config, ModelDescription model);
  void give_parameters_back();
  void meet_for_buffers();
  [[nodiscard]] Next share_and_join();
  void announce(const World& world) const;
  /// The line of progress, if one is due, and the record of the step.
  void report(const StepResult& result);
  /// Throws kUsage in a forked child: memory and transport belong to the process that made the engine.
  void require_own_process() const;
  /// Tells the core which parameters get gradients now. Throws kModel for one that was frozen for good and now wants
  /// one.
  void look_at_trainability();
  void install_hooks(const EngineOptions& options);
  void make_gradient_guards();
  /// `.grad` of all trainable parameters: guards, or undefined.
  void guard_gradients();
  void clear_gradients();
  /// Throws kUsage if somebody took guards away while the engine has gradients: module.zero_grad(), `.grad = None`.
  void require_guards() const;
  void enter_backward();
  void leave_backward();
  void finish_unit(int unit);
  /// Ends those whose last node has run, now that the backward comes to a node that is older than those of
  /// `younger(running)`.
  template <class Younger>
  void finish_earlier_backwards(const Younger& younger);
  [[nodiscard]] bool awaits_earlier_use(const Invocation& use);
  /// Ends those running uses that `over(running)` is true for, the last one first.
  template <class Over>
  void finish_uses(const Over& over);
  /// 16-bit parameters whose gradient is no sum: it comes as it was computed.
  void choose_widths();
  void widen_all();

  Config config_;
  ModelDescription model_;
  Logger log_;
  std::function<void(const Error&)> rethrow_;
  mutable std::mutex hooks_;
  std::unique_ptr<Device> device_;
  std::shared_ptr<TrafficTable> traffic_;
  ParameterSlots slots_;
  std::unique_ptr<zeroth::Engine> core_;
  std::vector<int> active_uses_;  // per unit, in this backward
  /// A use of a unit whose backward has begun and is not known to be over.
  struct Running {
    Invocation use;
    std::uint64_t first_node;
    int graph_task;
  };
  std::vector<Running> running_;
  std::vector<std::vector<std::weak_ptr<const UnitUse>>>
      awaited_;                   // per unit, in order, those of which no backward has begun
  std::uint64_t last_begun_ = 0;  // number of the forward of a unit that began last
  std::vector<int> trainable_;
  std::unordered_set<const at::TensorImpl*> parameters_;
  struct Narrow {
    int param;
    std::optional<at::ScalarType> grad_dtype;  // the user's
  };
  std::vector<Narrow> narrow_;               // trainable 16-bit parameters
  std::vector<at::Tensor> gradient_guards_;  // one a trainable parameter, or none
  std::vector<std::size_t> guarded_;         // those whose `.grad` is a guard now
  bool in_backward_ = false;
  bool evaluates_ = false;  ///< the last forward of the whole model was one without gradients
  std::uint64_t backward_seq_ = 0;
  int counted_in_ = -1;  // graph task in which uses were counted last
  pid_t owner_;
  Milliseconds progress_every_{0};
  SteadyClock::time_point reported_at_ = SteadyClock::now();  // the last line of progress, or the beginning
  std::int64_t reported_step_ = 0;
  SteadyClock::time_point stepped_at_ = SteadyClock::now();
};

}  // namespace zeroth::libtorch
