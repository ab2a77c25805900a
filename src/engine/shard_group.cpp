#include "engine/shard_group.h"

#include "engine/initial_values.h"
#include "zero/call_tags.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/param_axes.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace zeroth {
namespace {

bool contains(std::span<const std::string> axes, std::string_view axis) {
  return std::ranges::find(axes, axis) != axes.end();
}

std::vector<std::string> names_of(const MeshSpec& mesh) {
  std::vector<std::string> names;
  for (const MeshAxis& axis : mesh.axes) names.push_back(axis.name);
  return names;
}

/// `axes` without the one that the members differ along.
std::vector<std::string> without(std::span<const std::string> axes, const std::string& axis) {
  std::vector<std::string> rest(axes.begin(), axes.end());
  std::erase(rest, axis);
  return rest;
}

bool is_member(const ShardGroupSpec::Members& members, const MeshPlace& place) {
  return members.axis.empty() ||
         std::ranges::find(members.coordinates, place.coordinate(members.axis)) != members.coordinates.end();
}

/// Ranks that differ along `axes` only have one color; of an axis with members, these do, and the others stay apart.
GroupColors colors_of(const MeshPlace& place, std::span<const std::string> axes, const ShardGroupSpec::Members& members,
                      int world) {
  GroupColors colors;
  for (int rank = 0; rank < world; ++rank) {
    const MeshPlace there(place.spec(), rank, world);
    colors.push_back(is_member(members, there) ? there.color(axes) : world + there.color(without(axes, members.axis)));
  }
  return colors;
}

void require_axes(const ShardGroupSpec& spec, const MeshPlace& place, std::span<const std::string> batch_axes) {
  for (const MeshAxis& axis : place.spec().axes) {
    const bool sums = contains(spec.plan.axes, axis.name);
    const bool differs = contains(spec.distinct_axes, axis.name);
    ZR_CHECK(!(sums && differs), ErrorCode::kConfig, "a shard group sums gradients of different parameters",
             {.where = "engine.shard_group",
              .which = spec.name + ", axis " + axis.name,
              .expected = "an axis of the plan, or one along which parameters differ"});
    ZR_CHECK(sums || differs || axis.size == 1 || !contains(batch_axes, axis.name), ErrorCode::kConfig,
             "a shard group leaves out gradients of ranks that have batches of their own",
             {.where = "engine.shard_group",
              .which = spec.name + ", axis " + axis.name,
              .expected = "every batch axis in the plan's axes, or in those along which parameters differ",
              .got = "a plan over " + join(spec.plan.axes, ", ")});
  }
}

}  // namespace

int size_of_group(const ShardGroupSpec& spec, const MeshPlace& place) {
  if (spec.members.axis.empty()) return place.size(spec.plan.axes);
  const int along = is_member(spec.members, place) ? static_cast<int>(spec.members.coordinates.size()) : 1;
  return along * place.size(without(spec.plan.axes, spec.members.axis));
}

std::vector<ShardGroupSpec> shard_groups_of(const EngineSettings& settings) {
  if (!settings.shard_groups.empty()) return settings.shard_groups;
  return {{.name = "model", .plan = settings.plan}};
}

MeshPlace mesh_place_of(const EngineSettings& settings, int rank, int world) {
  if (!settings.mesh.axes.empty()) return MeshPlace(settings.mesh, rank, world);
  // Plans of a job without a mesh are over all ranks, whatever they call them: the other axes have one rank.
  MeshSpec spec;
  for (const ShardGroupSpec& group : shard_groups_of(settings)) {
    for (const std::string& axis : group.plan.axes) {
      const bool known = std::ranges::any_of(spec.axes, [&](const MeshAxis& one) { return one.name == axis; });
      if (!known) spec.axes.push_back({.name = axis, .size = spec.axes.empty() ? world : 1});
    }
  }
  if (spec.axes.empty()) spec.axes.push_back({.name = "dp", .size = world});
  return MeshPlace(std::move(spec), rank, world);
}

std::vector<std::string> batch_axes_of(const EngineSettings& settings, const MeshPlace& place) {
  return settings.batch_axes.empty() ? names_of(place.spec()) : settings.batch_axes;
}

std::vector<Degrees> degrees_of_groups(const EngineSettings& settings, const MeshPlace& place) {
  std::vector<Degrees> degrees;
  for (const ShardGroupSpec& spec : shard_groups_of(settings)) {
    spec.plan.validate();
    degrees.push_back(spec.plan.degrees(size_of_group(spec, place)));
  }
  return degrees;
}

ShardGroups make_shard_groups(ModelParts& split, const EngineSettings& settings, const MeshPlace& place, int world,
                              GroupTraits traits) {
  const std::vector<std::string> batch_axes = batch_axes_of(settings, place);
  std::vector<ShardGroupSpec> specs = shard_groups_of(settings);
  ShardGroups groups;
  for (std::size_t index = 0; index < specs.size(); ++index) {
    ShardGroupSpec& spec = specs[index];
    spec.plan.holds_gradients = settings.update.delayed_after.has_value();
    spec.plan.rounds_sums = settings.update.rounds_sums;
    ResidencyPlan& residency = spec.plan.residency;
    residency.beside_device = traits.beside_device;
    if (residency.beside_device && residency.chooses_blocks) residency.block_elements = kBlockBesideDevice;
    if (!traits.asynchronous) spec.plan.prefetch_units = 0;  // nothing goes ahead of the caller: no slot for it
    if (!traits.narrow_buckets) spec.plan.narrow_buckets = false;
    if (traits.messages) {  // of the gradients of a step, which stay until its update
      spec.plan.holds_messages = true;
      spec.plan.narrow_buckets = false;
      spec.plan.policy = ReductionPolicy::kPerStep;
    }
    if (settings.stragglers > 0) spec.plan.policy = ReductionPolicy::kPerStep;  // when it is known whose count
    groups.push_back(
        std::make_unique<ShardGroup>(std::move(spec), std::move(split.parts[index]), place, batch_axes, world));
  }
  return groups;
}

TierTable planned_tiers(const ShardGroups& groups, const EngineSettings& settings,
                        std::span<const StateDeclaration> states) {
  TierTable table;
  for (const auto& group : groups)
    table += group->planned_tiers(states, settings.micro_steps, settings.storage.stripe_bytes);
  table.rows[static_cast<std::size_t>(MemoryState::kStaging)].host += settings.activation_staging();
  return table;
}

class ShardGroup::Binder final : public ParameterBinder {
 public:
  Binder(const std::vector<int>& flats, ParameterBinder& outer) : flats_(flats), outer_(outer) {}
  void bind(int flat, std::byte* data) override { outer_.bind(flats_[static_cast<std::size_t>(flat)], data); }
  void begin_update(int flat) override { outer_.begin_update(flats_[static_cast<std::size_t>(flat)]); }
  void lose_write(int flat, std::int64_t element) noexcept override {
    outer_.lose_write(flats_[static_cast<std::size_t>(flat)], element);
  }

 private:
  const std::vector<int>& flats_;
  ParameterBinder& outer_;
};

ShardGroup::ShardGroup(ShardGroupSpec spec, ModelPart part, const MeshPlace& place,
                       std::span<const std::string> batch_axes, int world)
    : spec_(std::move(spec)), part_(std::move(part)), colors_(colors_of(place, spec_.plan.axes, spec_.members, world)) {
  require_axes(spec_, place, batch_axes);
  const auto own = colors_.begin() + place.rank();
  size_ = static_cast<int>(std::ranges::count(colors_, *own));
  rank_ = static_cast<int>(std::count(colors_.begin(), own, *own));
  std::vector<std::string> copies;  // along these axes, ranks outside the group have the same parameters
  std::vector<std::string> alike;
  for (const MeshAxis& axis : place.spec().axes) {
    if (contains(spec_.distinct_axes, axis.name)) continue;
    alike.push_back(axis.name);
    if (!contains(spec_.plan.axes, axis.name)) copies.push_back(axis.name);
  }
  alike_colors_ = colors_of(place, alike, spec_.members, world);
  has_copies_ = place.size(copies) > 1;
  counts_in_norm_ = place.is_first(copies);
  distinct_color_ = place.color(spec_.distinct_axes);
}

ShardGroup::~ShardGroup() {
  uses_.reset();
  if (communicator_) communicator_->backend().set_tag_names({});  // they speak of this group's layout
}

void ShardGroup::connect(const std::shared_ptr<CommBackend>& job, bool shares_job) {
  const auto split = [&job](const GroupColors& colors, const std::string& name) -> std::shared_ptr<CommBackend> {
    return job->split(colors[static_cast<std::size_t>(job->rank())], job->rank(), name);
  };
  shares_job_ = shares_job;
  communicator_.emplace(shares_job ? job : split(colors_, spec_.name));
  if (has_copies_) alike_ = split(alike_colors_, spec_.name + " values");
}

void ShardGroup::allocate(const GroupResources& shared, OperationId step, const OperationNames& names) {
  CommBackend& backend = communicator_->backend();
  backend.set_tag_names(tag_names(layout(), spec_.plan.gathers_parameters(), names));
  const int micro_steps = micro_steps_of_memory(shared.settings.micro_steps);
  binder_ = std::make_unique<Binder>(part_.flats, shared.binder);
  memory_ = std::make_unique<ModelMemory>(layout(), spec_.plan, shared.optimizer.states(), micro_steps, shared.device,
                                          shared.kernels, backend, shared.files);
  parameters_ = std::make_unique<ParameterStore>(layout(), spec_.plan, *memory_, backend, shared.device,
                                                 shared.gather_stream, shared.kernels, *binder_, shared.counters);
  gradients_ =
      std::make_unique<GradientStore>(layout(), spec_.plan, micro_steps, *memory_, backend, shared.reduce_stream,
                                      shared.kernels, shared.host_kernels, shared.device.ledger());
  updater_ = std::make_unique<Updater>(layout(), shared.optimizer, *memory_, backend, shared.kernels,
                                       shared.host_kernels, shared.reduce_stream);
  if (spec_.plan.holds_messages) {
    round_ = std::make_unique<MessageRound>(
        layout(), shared.optimizer, *memory_, *gradients_, *communicator_, shared.kernels, shared.reduce_stream,
        shared.settings.own_reduction ? shared.settings.own_reduction : make_reduction,
        shared.settings.optimizer.compression);
  }
  gradients_->set_operations(step, names);
  uses_ = std::make_unique<UnitUses>(layout(), spec_.plan, *parameters_);
  trained_ = uses_->expected();
  writes_.assign(trained_.size(), 0);
}

int ShardGroup::initialize(const std::function<ConstTensorView(int)>& values,
                           const std::function<void(std::span<const int> params)>& release,
                           const GroupResources& shared) {
  const Communicator alike = replica_ranks();
  InitialValues initial(layout(), *memory_, shared.device, shared.kernels, shared.gather_stream, alike);
  const auto number = [](const std::vector<int>& numbers, int index) {
    return numbers[static_cast<std::size_t>(index)];
  };
  const int differing = initial.bring([&](int param) { return values(number(part_.params, param)); },
                                      [&](int unit) {
                                        std::vector<int> params = layout().units[static_cast<std::size_t>(unit)].params;
                                        for (int& param : params) param = number(part_.params, param);
                                        release(params);
                                      });
  staging_bytes_ = initial.staging_bytes();
  parameters_->publish();
  for (int flat = 0; !spec_.plan.gathers_parameters() && flat < static_cast<int>(part_.flats.size()); ++flat) {
    binder_->bind(flat, memory_->parameters(flat));
  }
  return differing < 0 ? -1 : number(part_.units, differing);
}

void ShardGroup::end_backward() {
  gradients_->close_backward();
  trained_ = uses_->expected();
  uses_->end_backward();
}

void ShardGroup::require_usable(int unit) const {
  for (const int flat : layout().unit_flats[static_cast<std::size_t>(unit)]) {
    ZR_CHECK(!updater_->is_updated(flat), ErrorCode::kUsage, "a unit is used again after its update has begun",
             {.where = "engine",
              .which = "unit " + layout().units[static_cast<std::size_t>(unit)].name,
              .expected = "no use between its last gradients of a step and step()",
              .hint = "leave out zeroth.update for models that use a unit after its gradients are there"});
  }
}

bool ShardGroup::update_ended(const UpdateTerms& terms, bool is_delayed) {
  updater_->prefetch();
  bool any = false;
  std::vector<int> waiting;
  for (const int unit : std::exchange(ended_, {})) {
    const std::vector<int>& flats = layout().unit_flats[static_cast<std::size_t>(unit)];
    const auto is_final = [this](int flat) { return !layout().flat(flat).trainable || gradients_->are_final(flat); };
    if (!std::ranges::all_of(flats, is_final)) {
      waiting.push_back(unit);
      continue;
    }
    for (const int flat : flats) {
      if (!layout().flat(flat).trainable) continue;
      if (!is_delayed && gradients_->has_sums(flat) && gradients_->norm(flat).nonfinite_blocks() > 0) {
        stopped_ = true;
        return any;
      }
      parameters_->begin_update(flat);
      binder_->begin_update(flat);
      updater_->update_flat(flat, is_delayed ? held_ : has_grad(), terms);
      any = true;
    }
  }
  ended_ = std::move(waiting);
  return any;
}

void ShardGroup::forget_ended() {
  ended_.clear();
  stopped_ = false;
  updater_->forget_updated();
}

void ShardGroup::begin_round(std::int64_t committed) {
  if (round_ != nullptr) round_->set(committed);
  updater_->begin_round(committed, has_own_norms());
}

WireBytes ShardGroup::replaced_by_messages(WireBytes wire) const {
  if (!has_own_norms()) return wire;
  const MessageWire messages = round_->wire();
  wire.reduce_gradients = static_cast<std::uint64_t>(messages.all_to_all);
  wire.gather_gradients = static_cast<std::uint64_t>(messages.all_gather);
  return wire;
}

void ShardGroup::exchange_messages(const UpdateTerms& terms) {
  if (!has_own_norms()) return;
  round_->exchange(has_grad_anywhere_, terms, updater_->updates());
  updater_->set_rates(round_->rates(), round_->local_steps());
  if (!round_->is_local()) return;
  std::vector<const std::byte*> sums;
  for (int flat = 0; flat < static_cast<int>(layout().flats.size()); ++flat)
    sums.push_back(layout().flat(flat).trainable ? gradients_->own_gradients(flat) : nullptr);
  updater_->set_own_sums(std::move(sums));
}

void ShardGroup::update(const UpdateTerms& terms) {
  updater_->update(has_grad_anywhere_, terms);
  if (has_own_norms()) round_->end_update(has_grad_anywhere_);
}

std::vector<std::string> ShardGroup::tensor_names() const {
  std::vector<std::string> names;
  for (const ParamSpec& param : layout().params) {
    // Without a box, ranks along these axes have other parameters, if under one name.
    const bool is_own = param.logical_shape.empty() && !spec_.distinct_axes.empty();
    names.push_back(param.tensor_name() + (is_own ? "@" + std::to_string(distinct_color_) : ""));
  }
  return names;
}

bool ShardGroup::splits_tensors() const {
  const auto is_box = [](const ParamSpec& param) { return !param.logical_shape.empty(); };
  return spec_.plan.degrees(size_).optimizer > 1 || std::ranges::any_of(layout().params, is_box);
}

void ShardGroup::set_tensors(const TensorFacts& facts) {
  std::vector<int> numbers;
  for (const std::string& name : tensor_names()) numbers.push_back(facts.number(name));
  updater_->set_tensors(std::move(numbers), counts_in_norm_);
}

void ShardGroup::hold_sums() {
  held_ = has_grad_anywhere_;
  updater_->hold();
}

void ShardGroup::restore_held(std::vector<bool> held) {
  held_ = std::move(held);
  updater_->set_held(!held_.empty());
}

void ShardGroup::complete_uses() {
  uses_->release_kept();
  parameters_->quiesce();
}

void ShardGroup::complete_step() {
  updater_->prefetch();  // while gradients are reduced, and ranks vote
  complete_uses();
  gradients_->complete();
}

void ShardGroup::add_norm(kernels::NormAccumulator& norm, int data_ranks) const {
  if (has_own_norms()) {
    // Of gradients that more ranks add up than have batches (stages of a pipeline, slices of a sequence).
    const double factor = std::sqrt(std::max(1.0, static_cast<double>(size_) / data_ranks));
    if (counts_in_norm_) gradients_->add_own_norm(norm, factor);
    return;
  }
  for (int flat = 0; counts_in_norm_ && flat < static_cast<int>(part_.flats.size()); ++flat) {
    if (gradients_->has_sums(flat)) norm.merge(gradients_->norm(flat));
  }
}

std::vector<bool> ShardGroup::has_grad() const {
  std::vector<bool> has_grad;
  for (int param = 0; param < static_cast<int>(part_.params.size()); ++param) {
    has_grad.push_back(gradients_->has_grad(param));
  }
  return has_grad;
}

MemorySnapshot ShardGroup::planned_memory(const ShardingPlan& plan, std::span<const StateDeclaration> states,
                                          int micro_steps) const {
  return plan_memory(layout(), plan, rank_, states, micro_steps_of_memory(micro_steps));
}

std::uint64_t ShardGroup::planned_files(std::span<const StateDeclaration> states, int micro_steps,
                                        std::size_t stripe_bytes) const {
  return plan_file_bytes(layout(), spec_.plan, rank_, states, micro_steps_of_memory(micro_steps), stripe_bytes);
}

FileTraffic ShardGroup::planned_file_traffic(BlockSet set, std::span<const StateDeclaration> states, int micro_steps,
                                             std::span<const int> gathers, int passes) const {
  return plan_file_traffic(layout(), spec_.plan, rank_, states, micro_steps, set, gathers, passes);
}

TierTable ShardGroup::planned_tiers(std::span<const StateDeclaration> states, int micro_steps,
                                    std::size_t stripe_bytes) const {
  return plan_tiers(layout(), spec_.plan, rank_, states, micro_steps_of_memory(micro_steps), stripe_bytes);
}

bool ShardGroup::spans_stages() const {
  return contains(spec_.plan.axes, kPipelineAxis);
}

int ShardGroup::micro_steps_of_memory(int micro_steps) const {
  return spans_stages() ? std::max(2, micro_steps) : micro_steps;
}

void ShardGroup::share_sums() {
  if (has_own_norms()) return;
  if (spec_.plan.gathers_gradients(size_)) gradients_->share_sums();
}

std::size_t ShardGroup::transport_bytes() const {
  const std::size_t own = shares_job_ ? 0 : communicator_->backend().memory_bytes();
  return own + (alike_ ? alike_->memory_bytes() : 0) + memory_->transport_bytes() + parameters_->transport_bytes() +
         gradients_->transport_bytes();
}

}  // namespace zeroth
