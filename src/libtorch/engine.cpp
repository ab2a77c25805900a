#include "libtorch/model_scan.h"
#include "libtorch/runtime.h"

#include <zeroth/engine/settings.h>
#include <zeroth/libtorch/engine.h>
#include <zeroth/libtorch/rank_group.h>
#include <zeroth/libtorch/same_tensors.h>

#include <algorithm>

namespace zeroth::libtorch {
namespace {

/// Of the ranks that are given the same tensors, `along` these axes; null where each has its own. Collective, blocks.
std::shared_ptr<const RankGroup> make_batch_ranks(const Config& config, const World& world,
                                                  const std::vector<std::string>& along) {
  const MeshSpec mesh = mesh_of(config, world.size());
  const MeshPlace place(mesh, world.rank(), world.size());
  std::vector<std::string> axes;
  for (const MeshAxis& axis : mesh.axes) {
    if (std::ranges::find(along, axis.name) != along.end()) axes.push_back(axis.name);
  }
  if (place.size(axes) == 1) return nullptr;
  // Counted apart from the engine's traffic.
  std::shared_ptr<CommBackend> all =
      world.connect(make_comm_options(config, world.size()), std::make_shared<TrafficTable>());
  if (place.size(axes) == world.size()) return std::make_shared<const RankGroup>(Communicator(std::move(all)));
  std::shared_ptr<CommBackend> group = all->split(place.color(axes), world.rank(), place.name(axes));
  return std::make_shared<const RankGroup>(Communicator(std::move(group)));
}

}  // namespace

GroupHyper hyper_of(const ParamGroup& group, GroupHyper otherwise) {
  GroupHyper hyper = otherwise;
  if (group.lr) hyper.lr = *group.lr;
  if (group.weight_decay) hyper.weight_decay = *group.weight_decay;
  if (group.betas) {
    hyper.beta1 = (*group.betas)[0];
    hyper.beta2 = (*group.betas)[1];
  }
  if (group.eps) hyper.eps = *group.eps;
  if (group.momentum) hyper.momentum = *group.momentum;
  if (group.dampening) hyper.dampening = *group.dampening;
  if (group.nesterov) hyper.nesterov = *group.nesterov;
  return hyper;
}

EngineBase::EngineBase(std::shared_ptr<torch::nn::Module> model, Config config, const World& world,
                       EngineOptions options)
    : owner_(model) {
  ZR_CHECK(config.activations.choice == "given", ErrorCode::kConfig, "no C++ program measures units",
           {.where = "libtorch.engine",
            .which = "/zeroth/activations/choice",
            .expected = "given",
            .got = config.activations.choice,
            .hint = "plan_activations() of zeroth/program/activation_plan.h chooses from times that you measure"});
  ScannedModel scanned = scan_model(*model, options);
  const std::vector<std::string> same_batches = options.same_batches;
  runtime_ = Runtime::create(std::move(scanned.model), std::move(config), world, std::move(options));
  for (std::size_t unit = 0; unit < scanned.wrappers.size(); ++unit) {
    if (scanned.wrappers[unit] != nullptr) scanned.wrappers[unit]->connect(runtime_, static_cast<int>(unit));
  }
  batch_ranks_ = make_batch_ranks(runtime_->config(), world, same_batches);
}

EngineBase::EngineBase(ModelDescription model, Config config, const World& world, EngineOptions options)
    : runtime_(Runtime::create(std::move(model), std::move(config), world, std::move(options))) {}

EngineBase::EngineBase(EngineBase&&) noexcept = default;
EngineBase& EngineBase::operator=(EngineBase&&) noexcept = default;
EngineBase::~EngineBase() = default;

void EngineBase::require_same_batch(const std::vector<NamedTensor>& tensors) const {
  require_same(tensors, *batch_ranks_,
               {.where = "libtorch.forward",
                .what = "ranks that share a model were given different batches",
                .hint = "batches differ along dp only: choose them by mesh.coordinate(\"dp\"), not by the rank; "
                        "EngineOptions::same_batches = {} is for forwards that take slices"});
}

void EngineBase::backward(const at::Tensor& loss) {
  runtime_->backward(loss);
}
at::Tensor EngineBase::part_of_loss(const at::Tensor& term) const {
  return runtime_->part_of_loss(term);
}
std::uint64_t EngineBase::open_backward(const at::Tensor& loss) {
  return runtime_->open_backward(loss);
}
at::Tensor EngineBase::first_gradient(const at::Tensor& loss, const at::Tensor& gradient) const {
  return runtime_->first_gradient(loss, gradient);
}
void EngineBase::close_backward(std::uint64_t seen) {
  runtime_->close_backward(seen);
}
void EngineBase::replace_buffer(std::size_t index, at::Tensor tensor) {
  runtime_->replace_buffer(index, std::move(tensor));
}
void EngineBase::set_buffers(std::vector<NamedBuffer> buffers) {
  runtime_->set_buffers(std::move(buffers));
}
bool EngineBase::shares_buffers() const {
  return runtime_->shares_buffers();
}
void EngineBase::share_buffers() {
  runtime_->share_buffers();
}
void EngineBase::fail_backward() {
  runtime_->fail_backward();
}
void EngineBase::release_parameters() {
  runtime_->release_parameters();
}
void EngineBase::zero_grad() {
  runtime_->discard_gradients();
}
void EngineBase::flush_update() {
  runtime_->flush_update();
}
StepResult EngineBase::step() {
  return runtime_->step();
}
StepResult EngineBase::end_accumulation() {
  return runtime_->end_accumulation();
}
void EngineBase::begin_epoch() {
  runtime_->core().begin_epoch();
}
Next EngineBase::begin_batch(bool has_batch) {
  return runtime_->begin_batch(has_batch);
}
Next EngineBase::join() {
  return runtime_->join();
}
bool EngineBase::next_batch(bool has_batch) {
  Next next = begin_batch(has_batch);
  for (; next == Next::kStep; next = join()) (void)step();
  return next == Next::kBatch;
}
double EngineBase::average(double value, std::string_view name) {
  return runtime_->core().average(value, name);
}
std::string EngineBase::save(const std::string& folder, SaveOptions options) {
  return runtime_->save(folder, std::move(options));
}

SaveHandle EngineBase::save_async(const std::string& folder, SaveOptions options) {
  return runtime_->save_async(folder, std::move(options));
}

LoadReport EngineBase::load(const std::string& path, const LoadOptions& options) {
  return runtime_->load(path, options);
}

at::Tensor EngineBase::full(const std::string& name, const std::string& kind, const std::vector<int>& ranks) {
  at::Tensor whole;
  runtime_->read_states({.kind = kind, .names = {name}, .ranks = ranks},
                        [&whole](const std::string& /*name*/, at::Tensor tensor) { whole = std::move(tensor); });
  return whole;
}
void EngineBase::read_states(const StateQuery& query,
                             const std::function<void(const std::string& name, at::Tensor)>& take) {
  runtime_->read_states(query, take);
}
std::vector<LocalState> EngineBase::local(const std::string& kind) const {
  return runtime_->local_states(kind);
}
WeightReport EngineBase::load_state_dict(const std::vector<NamedTensor>& values, bool strict) {
  return runtime_->load_weights(values, {.strict = strict});
}
WeightReport EngineBase::load_mapped(const std::vector<NamedTensor>& values, bool strict, const std::string& failure) {
  return runtime_->load_weights(values, {.strict = strict, .everywhere = true, .failure = failure});
}
void EngineBase::local_updates(const LocalSettings& settings) {
  runtime_->add_local_updates(settings);
}
LocalReport EngineBase::local_report() const {
  return runtime_->local_report();
}
void EngineBase::add_average(const std::string& name) {
  runtime_->add_average(name);
}
void EngineBase::update_average(const std::string& name, double decay) {
  runtime_->update_average(name, decay);
}
void EngineBase::swap_average(const std::string& name) {
  runtime_->swap_average(name);
}
bool EngineBase::step_shares_buffers() const {
  return runtime_->step_shares_buffers();
}

void EngineBase::export_safetensors(const std::string& path) {
  runtime_->export_safetensors(path);
}
MemoryReport EngineBase::memory_report() const {
  return runtime_->memory_report();
}
WireReport EngineBase::wire_report() const {
  return runtime_->wire_report();
}
void EngineBase::reset_counters() {
  runtime_->reset_counters();
}
at::Tensor EngineBase::cast_input(at::Tensor input) const {
  const std::optional<DType> dtype = config().input_dtype();
  if (!dtype || !input.defined() || !input.is_floating_point()) return input;
  return input.to(*dtype == DType::kFloat16 ? at::kHalf : at::kBFloat16);
}
c10::Device EngineBase::device() const {
  return runtime_->device();
}
const Config& EngineBase::config() const {
  return runtime_->config();
}
zeroth::Engine& EngineBase::core() {
  return runtime_->core();
}
int EngineBase::rank() const {
  return runtime_->core().rank();
}
int EngineBase::world_size() const {
  return runtime_->core().world();
}

}  // namespace zeroth::libtorch
