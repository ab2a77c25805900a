#include "libtorch/runtime.h"

#include "libtorch/buffers.h"
#include "libtorch/engine_hook.h"
#include "libtorch/model_cast.h"
#include "libtorch/model_scan.h"
#include "libtorch/node_owners.h"
#include "libtorch/safetensors_export.h"
#include "libtorch/version_check.h"

#include <zeroth/base/error.h>
#include <zeroth/base/preemption.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/settings.h>
#include <zeroth/engine/tier_preview.h>
#include <zeroth/libtorch/expert_log.h>
#include <zeroth/libtorch/tier_preview.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <malloc.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <set>
#include <utility>

namespace zeroth::libtorch {

void refuse_compiled_autograd() {
  throw Error(ErrorCode::kModel, "a compiled backward does not run the engine's hooks",
              {.where = "libtorch.backward",
               .expected = "the ordinary autograd engine",
               .got = "compiled autograd",
               .hint = "leave torch._dynamo.config.compiled_autograd off; torch.compile of the forward is no trouble"});
}

namespace {

/// What is gathered at once at stage 3.
std::string units_line(const ModelDescription& model, const std::string& hint) {
  const auto elements = [&model](const UnitSpec& unit) {
    std::int64_t sum = 0;
    for (const int param : unit.params) sum += model.params[static_cast<std::size_t>(param)].numel();
    return sum;
  };
  std::int64_t all = 0;
  for (const UnitSpec& unit : model.units) all += elements(unit);
  const auto percent = [all](std::int64_t part) {
    return std::to_string(all > 0 ? (100 * part + all / 2) / all : 0) + " %";
  };
  const std::int64_t root = elements(model.units.front());
  std::int64_t largest = 0;
  for (std::size_t unit = 1; unit < model.units.size(); ++unit)
    largest = std::max(largest, elements(model.units[unit]));
  std::string line = "units: " + std::to_string(model.units.size() - 1);
  if (model.units.size() > 1)
    line += " with " + percent(largest) + " of the parameters at most, gathered one after the other,";
  line += " and the root with " + percent(root) + ", gathered from the beginning of forward to the end of backward";
  if (2 * root <= all) return line;
  return line + ": more or other units would need less memory" + (hint.empty() ? "" : "; " + hint);
}

/// Runs when a parameter's gradient is complete in `.grad`; chains what was there before.
class GradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(std::weak_ptr<Runtime> runtime, int param,
               std::unique_ptr<torch::autograd::PostAccumulateGradHook> previous,
               std::function<bool()> previous_has_work)
      : runtime_(std::move(runtime)),
        param_(param),
        previous_(std::move(previous)),
        previous_has_work_(std::move(previous_has_work)) {}

  void operator()(const at::Tensor& parameter) override {
    if (previous_ && (!previous_has_work_ || previous_has_work_())) (*previous_)(parameter);
    if (const auto runtime = runtime_.lock()) runtime->in_hook([&] { runtime->gradient(param_, parameter); });
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }
  [[nodiscard]] std::unique_ptr<torch::autograd::PostAccumulateGradHook> take_previous() {
    return std::move(previous_);
  }

 private:
  std::weak_ptr<Runtime> runtime_;
  int param_;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> previous_;
  std::function<bool()> previous_has_work_;
};

/// Two or more groups: the configuration's, then one for each of the user's.
std::vector<GroupHyper> group_hypers(const Config& config, const std::vector<ParamGroup>& groups) {
  std::vector<GroupHyper> hypers{group_hyper(config)};
  for (const ParamGroup& group : groups) hypers.push_back(hyper_of(group, hypers[0]));
  return hypers;
}

/// Makes the shard groups of a model whose parameters ranks share.
void share_parameters(ModelDescription& model, const Config& config, EngineSettings& settings) {
  const auto shared = std::ranges::find_if(model.axes, [](const ParamAxes& one) { return !(one == ParamAxes{}); });
  const bool any = shared != model.axes.end();
  if (config.mesh.splits_models()) {
    ZR_CHECK(any || config.mesh.tp <= 1, ErrorCode::kModel, "no parameter of the model is split along tp",
             {.where = "libtorch.scan",
              .which = "/zeroth/mesh/tp = " + std::to_string(config.mesh.tp),
              .expected = "modules of zeroth/libtorch/tensor_parallel.h, or zeroth.parallelize(model)"});
    const bool has_experts =
        std::ranges::any_of(model.axes, [](const ParamAxes& one) { return one.distinct == kExpertAxis; });
    ZR_CHECK(has_experts || config.mesh.ep <= 1 || config.mesh.pp > 1, ErrorCode::kModel,
             "no parameter of the model is an expert's, along ep",
             {.where = "libtorch.scan",
              .which = "/zeroth/mesh/ep = " + std::to_string(config.mesh.ep),
              .expected = "modules of zeroth/libtorch/experts.h, shared by the ranks, or zeroth.experts(model, mesh)"});
    const bool staged = std::ranges::any_of(model.axes, [](const ParamAxes& one) { return !one.stages.empty(); });
    ZR_CHECK(staged || config.mesh.pp <= 1, ErrorCode::kModel, "the model is not cut into stages",
             {.where = "libtorch.scan",
              .which = "/zeroth/mesh/pp = " + std::to_string(config.mesh.pp),
              .expected = "zeroth/libtorch/pipeline_engine.h, or zeroth.pipeline(model)"});
    return group_by_axes(model.params, model.axes, settings);
  }
  if (!any) return;
  const auto param = static_cast<std::size_t>(shared - model.axes.begin());
  const std::string axis = shared->distinct.empty() ? join(shared->summed, ", ") : shared->distinct;
  throw Error(ErrorCode::kConfig, "the model is split over ranks, and the configuration is not",
              {.where = "libtorch.scan",
               .which = model.params[param].name + ", along " + axis,
               .expected = "zeroth.mesh with the axes that the model was split for",
               .got = "no /zeroth/mesh"});
}

std::string json_log_of(const EngineOptions& options) {
  const char* variable = std::getenv("ZEROTH_JSON_LOG");
  return options.json_log.empty() && variable != nullptr ? variable : options.json_log;
}

/// States that the checkpoint has and this engine has not, such as an average: for the report alone.
void name_unwanted_states(LoadReport& report, const std::vector<std::string>& kinds) {
  for (const CheckpointParam& param : report.manifest.params) {
    for (const CheckpointState& state : param.states) {
      if (state.name == "weight" || std::ranges::find(kinds, state.name) != kinds.end()) continue;
      report.unexpected.push_back(param.name + "/" + state.name);
    }
  }
}

}  // namespace

TierTable preview_tiers(ModelDescription model, Config config, const std::vector<ParamGroup>& groups, int rank,
                        int world) {
  config.validate();
  if (const std::optional<DType> dtype = dtype_to_cast_to(config, model)) {
    for (std::size_t param = 0; param < model.params.size(); ++param) {
      if (model.tensors[param].scalar_type() == at::kFloat) model.params[param].dtype = *dtype;
    }
  }
  EngineSettings settings = make_settings(config, {.world = world, .on_host = world}, group_hypers(config, groups));
  share_parameters(model, config, settings);
  return zeroth::preview_tiers(std::move(model.params), std::move(model.units), settings, rank, world);
}

Runtime::Runtime(Config config, ModelDescription model)
    : config_(std::move(config)), model_(std::move(model)), slots_(model_.tensors, model_.params), owner_(::getpid()) {}

void Runtime::require_own_process() const {
  ZR_CHECK(
      ::getpid() == owner_, ErrorCode::kUsage, "a forked child uses the engine of its parent",
      {.where = "libtorch",
       .expected = "process " + std::to_string(owner_),
       .got = "process " + std::to_string(::getpid()),
       .hint = "only the process that made the engine can train; start helpers before it, or let them work on copies"});
}

void Runtime::look_at_trainability() {
  for (std::size_t param = 0; param < model_.params.size(); ++param) {
    const bool now = slots_.tensor(static_cast<int>(param)).requires_grad();
    ZR_CHECK(!now || model_.params[param].trainable, ErrorCode::kModel,
             "a parameter became trainable that has no place for its gradient",
             {.where = "libtorch.forward",
              .which = model_.params[param].name,
              .expected = "requires_grad as when the engine was built",
              .got = "requires_grad is true now",
              .hint = "name it in trainable_later, or in a parameter group, when the engine is built: then it has "
                      "moments from the beginning, and may become trainable at any step"});
    core_->expect_gradient(static_cast<int>(param), now);
  }
}

std::shared_ptr<Runtime> Runtime::create(ModelDescription model, Config config, const World& world,
                                         EngineOptions options) {
  require_same_torch();
  config.validate();
  CastLog cast;
  OriginalValues originals = cast_model(config, model, cast);  // first: the runtime's parts keep the dtypes
  std::shared_ptr<Runtime> runtime(new Runtime(std::move(config), std::move(model)));
  runtime->log_ = Logger(world.rank(), world.size(), options.log_level, json_log_of(options));
  runtime->step_log_.set_every(options.progress_every);
  runtime->rethrow_ = options.rethrow;
  runtime->words_ = &words_of(options.front_end);
  runtime->slots_.set_words(*runtime->words_);
  runtime->slots_.set_rethrow(options.rethrow);
  runtime->slots_.set_source(runtime);
  runtime->slots_.set_initial(options.initial_value);
  if (runtime->config_.runtime.preemption) catch_preemption();
  runtime->announce(world);
  if (!cast.text.empty()) runtime->log_.progress(cast.text);
  runtime->device_ = make_cpu_device(
      runtime->config_.runtime.execution,
      static_cast<std::uint64_t>(runtime->config_.runtime.chaos_seed) + static_cast<std::uint64_t>(world.rank()));
  runtime->traffic_ = std::make_shared<TrafficTable>();
  runtime->world_.emplace(world);
  EngineSettings settings = make_settings(runtime->config_, {.world = world.size(), .on_host = world.ranks_on_host()},
                                          group_hypers(runtime->config_, options.groups));
  settings.libraries = torch_version_text();
  share_parameters(runtime->model_, runtime->config_, settings);
  runtime->require_same_mesh(world);
  runtime->core_ = std::make_unique<zeroth::Engine>(
      runtime->model_.params, runtime->model_.units, settings, *runtime->device_,
      world.connect(make_comm_options(runtime->config_, world.size()), runtime->traffic_), runtime->slots_,
      runtime->log_);
  runtime->announce_mesh();
  runtime->add_operations();
  if (world.is_watched()) runtime->core_->set_activity(world.activity());
  if (runtime->core_->settings().plan.gathers_parameters())
    runtime->log_.progress(units_line(runtime->model_, options.units_hint.empty() && options.front_end == FrontEnd::kCpp
                                                           ? runtime->words_->units
                                                           : options.units_hint));
  ParameterSlots& slots = runtime->slots_;
  const bool copies = !slots.device().is_cpu() || runtime->config_.runtime.compute_copies;
  slots.set_layout(
      runtime->core_->layout(), runtime->core_->settings().plan.gathers_parameters(),
      copies ? std::make_unique<DeviceCopies>(slots.device(), runtime->core_->layout(), runtime->core_->settings().plan)
             : nullptr);
  libtorch::require_shareable(runtime->model_, runtime->core_->communicator());  // before any parameter is taken
  originals.forget();
  runtime->core_->initialize([&slots](int param) { return slots.initial_value(param); },
                             [&slots](std::span<const int> params) { slots.drop_initial(params); });
  if (const std::string buffer = libtorch::share_buffers(runtime->model_, runtime->core_->communicator());
      !buffer.empty()) {
    runtime->log_.warn("buffers differed from rank 0's (first: " + buffer + "); rank 0's are used");
  }
  slots.set_initial(nullptr);
  slots.take_versions();
  if (runtime->step_shares_buffers()) runtime->buffer_digests_ = buffer_digests(runtime->model_);
  runtime->traffic_->reset();
  runtime->install_hooks(options);
  runtime->loss_scale_ = std::make_unique<LossScale>(runtime->weak_from_this());
  runtime->loss_terms_ = std::make_unique<LossTerms>(runtime->model_, runtime->config_);
  NodeOwners::instance().add_engine(runtime);
  if (options.guard_gradients) runtime->guards_.make();
  (void)::malloc_trim(0);  // the model's own weights, and what a cast took, were the last use of that memory
  return runtime;
}

void Runtime::announce(const World& world) const {
  log_.progress(std::to_string(world.size()) + (world.size() == 1 ? " rank" : " ranks") + " over " +
                world.backend_name() + ", says " + world.origin());
  if (!world.not_taken().empty()) log_.warn(world.not_taken());
  for (const std::string& line : config_.describe()) {
    if (!line.ends_with("(default)")) log_.progress("config " + line);
  }
  for (const HintNote& hint : config_.hints) log_.progress("hint " + hint.text());
  if (config_.gradient_clipping == 0) log_.progress("gradient clipping is off");
  if (!slots_.device().is_cpu()) {
    log_.progress("computes on " + slots_.device().str() +
                  "; parameters, gradients and optimizer are kept and updated in host memory");
  }
  for (const ParamSpec& spec : model_.params) {
    for (const std::string& alias : spec.aliases) log_.progress("tied: " + alias + " -> " + spec.tensor_name());
  }
  std::set<std::string> dtypes;
  for (const ParamSpec& spec : model_.params) {
    if (!spec.trainable) continue;
    const std::string wide(name_of(accumulation_dtype(spec.dtype)));
    dtypes.insert("precision: parameters " + std::string(name_of(spec.dtype)) +
                  ", masters, sums of gradients and moments " + wide);
  }
  for (const std::string& line : dtypes) log_.progress(line);
  if (!scales_loss()) return;
  const LossScaling& fp16 = config_.fp16;
  log_.progress(fp16.is_dynamic() ? "loss scale 2^" + std::to_string(fp16.initial_power) + ", adapts"
                                  : "loss scale " + std::to_string(fp16.static_scale) + ", stays");
}

void Runtime::require_same_mesh(const World& world) const {
  static constexpr std::array<std::string_view, 4> kSharing = {kPipelineAxis, kExpertAxis, "sp", "tp"};
  const auto larger = [](MeshSpec mesh) {
    std::erase_if(mesh.axes, [](const MeshAxis& axis) { return axis.size == 1; });
    return mesh;
  };
  std::vector<MeshSpec> others;  // along which a model may have been shared
  for (const MeshSpec& mesh : world.meshes()) {
    const auto is_of_models = [](const MeshAxis& axis) {
      return axis.name == "dp" || std::ranges::find(kSharing, axis.name) != kSharing.end();
    };
    const MeshSpec one = larger(mesh);
    const bool shares = std::ranges::any_of(one.axes, [](const MeshAxis& axis) { return axis.name != "dp"; });
    if (shares && std::ranges::all_of(one.axes, is_of_models)) others.push_back(one);
  }
  if (others.empty()) return;
  if (!config_.mesh.splits_models()) {
    log_.warn("the ranks have a mesh " + describe(others.back()) +
              ", and the configuration has none: for this engine every rank has a batch of its own; /zeroth/mesh " +
              "says which ranks share one");
    return;
  }
  const MeshSpec own = mesh_of(config_, world.size());
  ZR_CHECK(std::ranges::find(others, larger(own)) != others.end(), ErrorCode::kConfig,
           "the mesh of the configuration is not the one whose groups the program has made",
           {.where = "libtorch.mesh",
            .who = "rank " + std::to_string(world.rank()) + "/" + std::to_string(world.size()),
            .which = "/zeroth/mesh",
            .expected = describe(larger(own)) + ", axes in this order",
            .got = describe(others.back()),
            .hint = "make it from the configuration: world.mesh(config), in Python "
                    "world.mesh(config.mesh(world.size), config)"});
}

void Runtime::announce_mesh() const {
  if (!config_.mesh.splits_models()) return;
  const MeshSpec mesh = mesh_of(config_, core_->world());
  std::string places;
  for (int rank = 0; rank < std::min(core_->world(), 8); ++rank) {
    const MeshPlace place(mesh, rank, core_->world());
    places += (rank == 0 ? "" : ", ") + std::to_string(rank) + " at";
    for (const MeshAxis& axis : mesh.axes) places += " " + std::to_string(place.coordinate(axis.name));
  }
  log_.progress("mesh " + describe(mesh) + ": rank " + places + (core_->world() > 8 ? ", ..." : ""));
  for (const ShardGroupSpec& group : core_->settings().shard_groups) {
    log_.progress("parameters " + group.name + ": sharded over " + zeroth::join(group.plan.axes, " x ") + " by " +
                  group.plan.name);
  }
  // Neighbours share matrices: they talk most.
  int first = 0;
  for (const int ranks : core_->communicator().backend().node_sizes()) {
    if (config_.mesh.tp > 1 && (first % config_.mesh.tp != 0 || ranks % config_.mesh.tp != 0)) {
      log_.warn("ranks that share matrices (tp=" + std::to_string(config_.mesh.tp) +
                ") are on several nodes: each layer waits for their link; let tp divide the ranks of a node");
      break;
    }
    first += ranks;
  }
}

void Runtime::add_operations() {
  const auto join_buffers = [this](int) -> std::optional<Next> {
    meet_for_buffers();
    return std::nullopt;
  };
  share_buffers_ =
      core_->add_operation({.name = "a forward that shares buffers", .join = join_buffers, .offered = false});
  export_ = core_->add_operation({.name = "an export"});
  close_ = core_->add_operation({.name = words_->give_back});
  load_weights_ = core_->add_operation({.name = "load_state_dict()"});
  edit_ = core_->add_operation({.name = std::string("the end of ") + words_->edit_call});
}

void Runtime::install_hooks(const EngineOptions& options) {
  backwards_.follow(*core_);
  for (std::size_t param = 0; param < model_.params.size(); ++param) {
    if (!model_.params[param].trainable) continue;
    const at::Tensor& tensor = model_.tensors[param];
    trainable_.push_back(static_cast<int>(param));
    trainable_by_tensor_.emplace(tensor.unsafeGetTensorImpl(), static_cast<int>(param));
    if (scales_loss()) level_captures(tensor, shared_from_this());
    tensor.mutable_grad().reset();
    if (size_of(model_.params[param].dtype) == 2) widths_.add(static_cast<int>(param));
    auto previous = std::move(torch::autograd::impl::post_acc_grad_hooks(tensor));
    torch::autograd::impl::set_post_acc_grad_hooks(
        tensor, std::make_unique<GradientHook>(
                    weak_from_this(), static_cast<int>(param), std::move(previous),
                    options.earlier_hooks ? options.earlier_hooks(model_.params[param].name) : nullptr));
  }
}

Runtime::~Runtime() {
  if (::getpid() != owner_) {
    // A forked child, a worker of a DataLoader for one: it has no copy of the pool's threads, so waiting for their end
    // would take for ever. Memory and transport are the parent's; the child keeps its view of them until it ends.
    (void)core_.release();
    (void)device_.release();
    return;
  }
  guards_.clear();
  for (const int param : trainable_) {
    auto& slot = torch::autograd::impl::post_acc_grad_hooks(slots_.tensor(param));
    if (auto* ours = dynamic_cast<GradientHook*>(slot.get())) {
      auto previous = ours->take_previous();
      slot = std::move(previous);
    }
  }
  widths_.restore();
  // The arenas go away with the engine: parameters, and what graphs saved of them, keep their shape and say so when
  // touched.
  if (core_) {
    core_->abandon(/*in_backward=*/false);  // leases of forwards that never had their backward
    slots_.retire();
  }
}

void Runtime::begin_part() {
  require_own_process();
  settle();
  if (core_->has_gradients()) guards_.require_there();
  guards_.clear();
  look_at_trainability();
  evaluates_ = !at::GradMode::is_enabled();
  if (!scales_loss()) return;
  if (depth_ == 0) loss_scale_->suspend();
  enter_depth();
}

void Runtime::end_part() noexcept {
  if (!scales_loss()) return;
  leave_depth();
  if (depth_ == 0) loss_scale_->resume();
}

void Runtime::enter_depth() {
  if (depth_++ == 0) forward_level_.emplace(GradientLevel::inside(shared_from_this()));
}

void Runtime::leave_depth() noexcept {
  if (--depth_ == 0) forward_level_.reset();
}

std::shared_ptr<UnitUse> Runtime::begin(int unit, UnitScope::Kind kind) {
  require_own_process();
  // Inside a backward it is a checkpoint around the whole model.
  if (unit == 0 && torch::autograd::get_current_graph_task_id() == -1) settle();
  if (core_->has_gradients()) guards_.require_there();
  guards_.clear();
  if (unit == 0 && !in_backward_) look_at_trainability();
  slots_.require_bound(unit);
  auto use = std::make_shared<UnitUse>();
  use->computed_again = in_backward_;
  if (unit == 0)
    evaluates_ = !at::GradMode::is_enabled();  // inside, a reentrant checkpoint has none in training either
  use->invocation = core_->begin_forward(unit, evaluates_ && !at::GradMode::is_enabled() && !in_backward_);
  core_->pre_forward(use->invocation);
  use->reads = kind == UnitScope::Kind::kReading;
  if (!use->reads) reads_.open(*use, at::RecordFunction::currentThreadId());
  if (!scales_loss() || use->reads) return use;
  use->outermost = depth_ == 0 && !NodeOwners::instance().runs_node_of(*this);
  enter_depth();
  if (use->outermost) loss_scale_->suspend();
  return use;
}

at::Tensor Runtime::follow_input(const UnitUse& use, const at::Tensor& input) {
  return use.outermost ? loss_scale_->open_input(input) : input;
}

void Runtime::end_scale(const UnitUse& use, const std::vector<at::Tensor>& outputs) {
  if (!use.outermost) return;
  loss_scale_->require_unwritten_leaves();
  loss_scale_->close_inputs();
  loss_scale_->scale_outputs(outputs, use.first_node);
}

void Runtime::leave_forward(const UnitUse& use) noexcept {
  if (!scales_loss() || use.reads) return;
  leave_depth();
  if (!use.outermost) return;
  loss_scale_->close_inputs();
  loss_scale_->resume();
}

std::string Runtime::name_of_parameter(const at::Tensor& tensor) const {
  const auto found = trainable_by_tensor_.find(tensor.unsafeGetTensorImpl());
  return found == trainable_by_tensor_.end() ? "" : model_.params[static_cast<std::size_t>(found->second)].name;
}

void Runtime::enter_scaled() {
  entered_in_ = torch::autograd::get_current_graph_task_id();
}
bool Runtime::was_entered() const {
  return entered_in_ == torch::autograd::get_current_graph_task_id();
}

void Runtime::defer(Error error) noexcept {
  const std::lock_guard lock(hooks_);
  if (!deferred_) deferred_ = std::make_exception_ptr(std::move(error));
}

void Runtime::refuse_entry(const std::string& parameter) noexcept {
  defer({ErrorCode::kModel,
         "a gradient would enter the model without the loss scale",
         {.where = "libtorch.loss_scale",
          .which = parameter.empty() ? "a tensor that left a forward beside its outputs" : parameter,
          .expected = "gradients through the outputs of the model's forward",
          .got = parameter.empty() ? "" : "a use of the parameter outside of it",
          .hint = "call engine.backward(loss) instead of loss.backward(), or use the parameter inside "
                  "engine.gathered(parameter)"}});
}

void Runtime::refuse_exit(const std::string& node) noexcept {
  defer({ErrorCode::kModel,
         "a gradient would leave the model with the loss scale",
         {.where = "libtorch.loss_scale",
          .which = "a tensor from outside (" + node +
                   ") that a forward uses beside its inputs, or a second derivative "
                   "by an input that was computed",
          .expected = "gradients through the inputs of the model's forward",
          .hint = "call engine.backward(loss) instead of loss.backward(); or hand the tensor over as an argument, for "
                  "second derivatives as a leaf (detach().requires_grad_())"}});
}

void Runtime::refuse_both_levels(const at::Tensor& leaf) noexcept {
  defer({ErrorCode::kModel,
         "a tensor would get gradients with the loss scale and without it",
         {.where = "libtorch.loss_scale",
          .which = leaf.toString() + " " + c10::str(leaf.sizes()) + ", a leaf",
          .expected = "one loss.backward() in which it is used inside of the model's forward only, or outside only",
          .hint = "call engine.backward(loss) instead of loss.backward(), or hand x * 1 over to the model"}});
}

at::Tensor Runtime::first_gradient(const at::Tensor& loss, const at::Tensor& gradient) const {
  if (!scales_loss()) return gradient;
  const at::NoGradGuard no_grad;
  return gradient.defined() ? gradient * core_->loss_scale() : at::full_like(loss, core_->loss_scale());
}

bool Runtime::shares_buffers() const {
  // Without gradients a forward is one of evaluation, which some ranks may do alone; in backward it is a checkpoint's,
  // done before.
  return config_.runtime.broadcast_buffers && at::GradMode::is_enabled() && !in_backward_ && core_->world() > 1 &&
         !model_.buffers.empty();
}

void Runtime::share_buffers() {
  if (shares_buffers()) meet_for_buffers();
}

void Runtime::meet_for_buffers() {
  core_->together([&] {
    core_->sync(share_buffers_);
    send_buffers(model_, core_->communicator());
  });
}

bool Runtime::step_shares_buffers() const {
  return config_.runtime.broadcast_buffers && core_->world() > 1 && has_statistics(model_);
}

void Runtime::share_statistics() {
  // All ranks are here, after their last forward: an evaluation on any of them sees the same statistics.
  std::vector<bool> changed;
  const std::vector<std::uint64_t> now = buffer_digests(model_);
  for (std::size_t index = 0; index < now.size(); ++index)
    changed.push_back(index >= buffer_digests_.size() || now[index] != buffer_digests_[index]);
  core_->together([&] { send_changed_buffers(model_, changed, core_->communicator()); });
  buffer_digests_ = buffer_digests(model_);
}

Next Runtime::begin_batch(bool has_batch) {
  require_own_process();
  settle();
  return core_->begin_batch(has_batch);
}

void Runtime::end(const std::shared_ptr<UnitUse>& use, Ended ended) {
  leave_forward(*use);
  core_->post_forward(use->invocation, ended.awaits_backward);
  backwards_.end_forward(use, ended.through_outputs);
  slots_.require_nothing_lost();
}

bool Runtime::bring(const std::vector<int>& params, const Storages& used) {
  if (::getpid() != owner_) return false;
  std::vector<int> units;
  for (const int param : params) units.push_back(core_->layout().places[static_cast<std::size_t>(param)].unit);
  std::ranges::sort(units);
  units.erase(std::ranges::unique(units).begin(), units.end());
  const auto tell = [this](int unit) {
    if (!read_units_.insert(unit).second) return;
    log_.progress("unit " + model_.units[static_cast<std::size_t>(unit)].name +
                  " is read in the forward of another one: it is gathered for that, too");
  };
  const bool in_forward = reads_.read(units, used, at::RecordFunction::currentThreadId(), [&](int unit) {
    tell(unit);
    return std::make_unique<UnitScope>(shared_from_this(), unit, UnitScope::Kind::kReading);
  });
  return in_forward || bring_to_node(units);
}

bool Runtime::bring_to_node(const std::vector<int>& units) {
  const auto node = torch::autograd::get_current_node();
  if (!in_backward_ || !node || !NodeOwners::instance().runs_node_of(*this)) return false;
  const std::lock_guard lock(hooks_);
  for (const int unit : units) {
    const auto use = std::make_shared<UnitUse>(UnitUse{.invocation = core_->begin_forward(unit),
                                                       .reads = true,
                                                       .thread = node->thread_id(),
                                                       .first_node = node->sequence_nr()});
    if (backwards_.begin(use)) core_->pre_backward(unit);
  }
  return true;
}

void Runtime::drop(const UnitUse& use) noexcept {
  reads_.drop(use);
  leave_forward(use);
  core_->drop_forward(use.invocation);
}

std::vector<int> Runtime::units_of(const std::vector<at::Tensor>& parameters) const {
  std::vector<int> units;
  for (const at::Tensor& parameter : parameters) {
    const auto same =
        std::ranges::find_if(model_.tensors, [&](const at::Tensor& one) { return one.is_same(parameter); });
    ZR_CHECK(same != model_.tensors.end(), ErrorCode::kUsage, "a tensor is no parameter of the engine's model",
             {.where = "libtorch.gathered",
              .which = parameter.defined() ? parameter.toString() + " " + c10::str(parameter.sizes()) : "undefined",
              .expected = "parameters as the model holds them, no views or copies of them"});
    units.push_back(core_->layout().places[static_cast<std::size_t>(same - model_.tensors.begin())].unit);
  }
  std::ranges::sort(units);
  units.erase(std::ranges::unique(units).begin(), units.end());
  return units;
}

void Runtime::enter_backward() {
  if (in_backward_) return;
  in_backward_ = true;
  guards_.clear();
  backwards_.begin_backward();
  widths_.choose(uses_);
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto runtime = weak.lock()) runtime->in_hook([&] { runtime->leave_backward(); });
  });
}

void Runtime::leave_backward() {
  if (!in_backward_) return;
  NodeOwners::instance().close_last();
  in_backward_ = false;
  backwards_.finish_backward();
  widths_.widen_all();
  guards_.set();
  core_->end_backward();
}

void Runtime::settle() {
  deferred_ = nullptr;
  if (explained_unit_ >= 0) slots_.explain(std::exchange(explained_unit_, -1), "");
  if (!in_backward_) return;
  NodeOwners::instance().close_last();
  in_backward_ = false;
  backwards_.abandon_backward();
  for (const int param : trainable_) slots_.tensor(param).mutable_grad().reset();
  widths_.widen_all();
  core_->abandon(/*in_backward=*/true);
}

void Runtime::fail_backward() {
  backward_level_.reset();
  uses_ = nullptr;
  const std::exception_ptr deferred = std::exchange(deferred_, nullptr);
  if (in_backward_) {
    settle();
  } else {
    core_->abandon(/*in_backward=*/true);
  }
  if (deferred) std::rethrow_exception(deferred);
}

void Runtime::before_backward(const std::shared_ptr<UnitUse>& use, std::uint64_t node) {
  enter_backward();
  backwards_.finish_younger_than(use->thread, node);
  if (!backwards_.begin(use)) return;
  if (use->computed_again && widths_.counted_in() != torch::autograd::get_current_graph_task_id()) widths_.choose();
  if (reads_parameters_) core_->pre_backward(use->invocation.unit);
}

void Runtime::before_node(const std::shared_ptr<UnitUse>& use, std::uint64_t node) noexcept {
  const std::lock_guard lock(hooks_);
  if (deferred_ || ::getpid() != owner_) return;
  try {
    before_backward(use, node);
  } catch (...) {
    deferred_ = std::current_exception();
    try {
      std::rethrow_exception(deferred_);
    } catch (const std::exception& error) {
      // Torch goes on to the node, which reads what is not there: it says why.
      explained_unit_ = use->invocation.unit;
      slots_.explain(explained_unit_, error.what());
    } catch (...) {  // nothing has a text
    }
  }
}

void Runtime::gradient(int param, const at::Tensor& parameter) {
  enter_backward();
  at::Tensor grad = parameter.grad();
  if (!grad.defined()) return;  // a function returned no gradient
  const ParamSpec& spec = model_.params[static_cast<std::size_t>(param)];
  if (grad.layout() != at::kStrided) grad = grad.to_dense();  // of an embedding with sparse=true
  if (grad.is_conj() || grad.is_neg()) grad = grad.resolve_conj().resolve_neg();
  if (!grad.is_cpu()) grad = grad.to(at::kCPU);  // waits for it
  if (grad.scalar_type() != parameter.scalar_type())
    grad = grad.to(at::kFloat);  // what a function of the user's own may return
  if (grad.strides() != parameter.strides() && grad.numel() > 0) {
    at::Tensor dense = at::empty_strided(parameter.sizes(), parameter.strides(), grad.options());
    dense.copy_(grad);
    grad = dense;
  }
  core_->grad_ready(param,
                    {static_cast<const std::byte*>(grad.const_data_ptr()), spec.shape, dtype_of(grad, spec.name)});
  parameter.mutable_grad().reset();
  backwards_.finish_unit(core_->layout().places[static_cast<std::size_t>(param)].unit);
}

void Runtime::backward(const at::Tensor& loss) {
  const std::uint64_t seen = open_backward(loss);
  try {
    loss.backward(first_gradient(loss, {}));
  } catch (...) {
    fail_backward();
    throw;
  }
  close_backward(seen);
}

std::uint64_t Runtime::open_backward_of_part(const GradientUses* uses) {
  const std::uint64_t seen = open_backward_of(uses);
  if (scales_loss()) backward_level_.emplace(GradientLevel::of_backward(*this, /*frees_leaves=*/false));
  return seen;
}

std::uint64_t Runtime::open_backward_of(const GradientUses* uses) {
  require_own_process();
  settle();
  if (core_->has_gradients()) guards_.require_there();
  guards_.clear();
  uses_ = uses;
  return backwards_.number();
}

std::uint64_t Runtime::open_backward(const at::Tensor& loss) {
  ZR_CHECK(loss.defined() && loss.requires_grad(), ErrorCode::kModel, "no gradient can flow from this loss",
           {.where = "libtorch.backward",
            .expected = "a tensor that requires grad",
            .got = loss.defined() ? "requires_grad is false" : "an undefined tensor",
            .hint = "compute it from the model's output, outside NoGradGuard, and do not detach() it"});
  look_at_terms(loss);
  const std::uint64_t seen = open_backward_of(nullptr);
  if (scales_loss()) backward_level_.emplace(GradientLevel::of_backward(*this, /*frees_leaves=*/true));
  return seen;
}

at::Tensor Runtime::part_of_loss(const at::Tensor& term) const {
  return loss_terms_->part(term,
                           [this](const auto& node) { return NodeOwners::instance().is_of_forward(node, *this); });
}

void Runtime::look_at_terms(const at::Tensor& loss) {
  if (told_of_term_ || !loss_terms_->any()) return;
  const std::string text =
      loss_terms_->plain(loss, [this](const auto& node) { return NodeOwners::instance().is_of_forward(node, *this); });
  told_of_term_ = !text.empty();
  if (told_of_term_ && core_->rank() == 0) log_.warn(text);
}

void Runtime::close_backward(std::uint64_t seen) {
  backward_level_.reset();
  uses_ = nullptr;
  // A loss that none of the engine's parameters was part of: this rank contributes nothing.
  if (backwards_.number() == seen) core_->end_backward();
}

void Runtime::discard_gradients() {
  require_own_process();
  settle();
  guards_.clear();
  core_->discard_gradients();
}

void Runtime::flush_update() {
  require_own_process();
  settle();
  guards_.clear();
  require_all_ours();
  take_writes();
  core_->flush_update();
  take_new_weights();
}

StepResult Runtime::end_step(StepEnd which) {
  require_own_process();
  settle();
  if (core_->has_gradients()) guards_.require_there();
  slots_.require_kept();
  const bool updates = which != StepEnd::kMicroStep || core_->ends_step();
  if (updates) {
    slots_.take_writes();
    note_writes(ParameterSlots::Digests::kWritten);
  }
  slots_.require_nothing_lost();
  StepResult result = which == StepEnd::kAll     ? core_->step_all()
                      : which == StepEnd::kShort ? core_->end_accumulation()
                                                 : core_->step();
  if (result.changed) {
    slots_.refresh(ParameterSlots::Renewed::kTrainable);
    slots_.bump_versions(trainable_);
  }
  if (updates) slots_.agree();
  if (result.boundary && step_shares_buffers()) share_statistics();
  if (result.boundary && core_->rank() == 0) step_log_.report(result);
  return result;
}

void note_experts(Runtime& runtime, double entropy, std::string layer, std::int64_t dropped) {
  runtime.note_experts(entropy, std::move(layer), dropped);
}

MemoryReport Runtime::memory_report() const {
  require_own_process();
  MemoryReport report = core_->memory_report();
  report.construction_peak += slots_.initial_peak();
  if (slots_.copies() != nullptr) report.compute_copies = slots_.copies()->bytes();
  return report;
}

void Runtime::release_parameters() {
  require_own_process();
  settle();
  core_->abandon(/*in_backward=*/false);
  slots_.take_writes();
  core_->together([&] { give_parameters_back(); });
}

void Runtime::give_parameters_back() {
  core_->sync(close_);
  const ModelLayout& layout = core_->layout();
  std::vector<at::Tensor> whole(model_.tensors.size());
  for (std::size_t index = 0; index < layout.flats.size(); ++index) {
    const FlatLayout& flat = layout.flats[index];
    std::vector<std::byte> values(flat.bytes());
    core_->read_flat(static_cast<int>(index), values.data());
    for (const Segment& segment : flat.segments) {
      const at::Tensor& like = slots_.tensor(segment.param);
      at::Tensor& own = whole[static_cast<std::size_t>(segment.param)];
      own = at::empty_strided(like.sizes(), like.strides(), like.options().requires_grad(false));
      if (own.nbytes() == 0) continue;
      own.copy_(at::from_blob(values.data() + static_cast<std::size_t>(segment.offset) * size_of(flat.dtype),
                              like.sizes(), like.strides(), at::TensorOptions().dtype(like.scalar_type())));
    }
  }
  core_->barrier();  // nobody reads another rank's shards after this
  slots_.give_back(whole);
}

void Runtime::export_safetensors(const std::string& path) {
  require_own_process();
  settle();
  core_->require_whole("an export");
  require_all_ours();
  take_writes();
  note_writes(ParameterSlots::Digests::kAll);
  core_->together([&] {
    core_->sync(export_);
    core_->require_same_writes();
    slots_.agree();
    libtorch::export_safetensors(path, *core_, model_);
  });
}

std::vector<at::Tensor> Runtime::prepare_save(SaveOptions& options) {
  require_own_process();
  settle();
  require_all_ours();
  take_writes();
  // What a script has written by parameter.data leaves no trace in autograd: here ranks compare all values.
  note_writes(ParameterSlots::Digests::kAll);
  core_->require_own_weights("save()");
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> keep;
  for (const NamedBuffer& buffer : model_.buffers) {
    if (!buffer.persistent || !buffer.tensor.defined() || core_->rank() != 0) continue;
    const SafetensorsEntry entry = safetensors_entry(buffer.name, buffer.tensor);
    const at::Tensor& values = keep.emplace_back(row_major(buffer.tensor));
    options.extras.push_back({.about = {.name = entry.name, .dtype = entry.dtype, .shape = entry.shape},
                              .data = {static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()}});
  }
  return keep;
}

std::string Runtime::save(const std::string& folder, SaveOptions options) {
  const std::vector<at::Tensor> keep = prepare_save(options);
  std::string path = core_->save(folder, options);
  slots_.agree();
  return path;
}

SaveHandle Runtime::save_async(const std::string& folder, SaveOptions options) {
  const std::vector<at::Tensor> keep = prepare_save(options);  // copied when it returns
  SaveHandle handle = core_->save_async(folder, options);
  slots_.agree();
  return handle;
}

/// Names of tied weights become the ones that the engine uses. `options.names` may say which name of the checkpoint has
/// which name in the model, or the other way round: all on one side are the model's. If both are, the first way it is.
LoadOptions Runtime::by_own_names(LoadOptions options) const {
  std::map<std::string, std::string> own;
  std::vector<std::string> all;
  for (const ParamSpec& spec : model_.params) {
    own[spec.tensor_name()] = spec.tensor_name();
    for (const std::string& alias : spec.aliases) own[alias] = spec.tensor_name();
  }
  for (const NamedBuffer& buffer : model_.buffers) own[buffer.name] = buffer.name;
  for (const auto& [name, _] : own) all.push_back(name);
  const auto is_own = [&own](const std::string& name) { return own.contains(unwrapped_name(name)); };
  const bool to_own = std::ranges::all_of(options.names, [&](const auto& pair) { return is_own(pair.second); }) ||
                      std::ranges::none_of(options.names, [&](const auto& pair) { return is_own(pair.first); });
  std::map<std::string, std::string> names;
  for (const auto& [first, second] : options.names) {
    const std::string there = unwrapped_name(to_own ? first : second);
    const auto found = own.find(unwrapped_name(to_own ? second : first));
    if (found == own.end()) {
      const std::string near = nearest_name(to_own ? second : first, all);
      throw Error(ErrorCode::kUsage, "the model has no parameter or buffer of this name",
                  {.where = "libtorch.load",
                   .which = first + " -> " + second,
                   .expected = "names of the checkpoint, each with the one that the model has",
                   .hint = near.empty() ? "" : "did you mean " + near + "?"});
    }
    names.emplace(found->second, there);
  }
  options.names = std::move(names);
  return options;
}

LoadReport Runtime::load(const std::string& path, const LoadOptions& given) {
  require_own_process();
  settle();
  guards_.clear();
  require_all_ours();
  slots_.take_writes();  // what is not loaded keeps them
  core_->require_own_weights("load()");
  const LoadOptions options = by_own_names(given);
  LoadReport report = core_->load(path, options);
  if (report.path.empty()) return report;
  ++loads_;
  name_unwanted_states(report, core_->state_kinds());
  slots_.refresh(ParameterSlots::Renewed::kAll);
  slots_.bump_versions(trainable_);
  slots_.agree(params_without(report.missing));
  const at::NoGradGuard no_grad;
  for (const NamedBuffer& buffer : model_.buffers) {
    if (!buffer.persistent || !buffer.tensor.defined()) continue;
    const auto found = std::ranges::find_if(
        report.extras, [&](const LoadedExtra& one) { return one.about.name == options.name_there(buffer.name); });
    const SafetensorsEntry entry = safetensors_entry(buffer.name, buffer.tensor);
    if (found == report.extras.end() || found->about.dtype != entry.dtype || found->about.shape != entry.shape) {
      report.missing.push_back(buffer.name);
      log_.warn("the checkpoint has no buffer " + buffer.name + " of this shape and dtype: its values stay");
      continue;
    }
    if (found->data.empty()) continue;
    buffer.tensor.copy_(at::from_blob(found->data.data(), buffer.tensor.sizes(),
                                      at::TensorOptions().dtype(buffer.tensor.scalar_type())));
  }
  for (const std::string& skipped : report.skipped) log_.warn("not a whole checkpoint, skipped: " + skipped);
  log_.progress("loaded " + report.path + ", step " + std::to_string(report.manifest.step) + " of " +
                std::to_string(report.manifest.world) + (report.manifest.world == 1 ? " rank" : " ranks"));
  return report;
}

WireReport Runtime::wire_report() const {
  const auto bytes = [this](CollectiveKind kind) { return traffic_->row(kind); };
  WireReport report{.planned_per_step = core_->planned_wire()};
  // Collectives of these kinds carry nothing else once the engine is built.
  report.all_gather = bytes(CollectiveKind::kAllGather).one_sided_bytes + bytes(CollectiveKind::kAllGather).bytes;
  report.reduce_scatter = bytes(CollectiveKind::kReduceScatter).one_sided_bytes +
                          bytes(CollectiveKind::kReduceScatter).bytes +
                          bytes(CollectiveKind::kAllToAll).bytes;  // messages of an optimizer
  report.between_nodes = traffic_->far_bytes();
  report.between_sites = across_traffic_->bytes();
  report.control = traffic_->bytes() - report.all_gather - report.reduce_scatter + traffic_->control_bytes();
  return report;
}

void Runtime::reset_counters() {
  traffic_->reset();
  across_traffic_->reset();
  core_->reset_peaks();
}

}  // namespace zeroth::libtorch
