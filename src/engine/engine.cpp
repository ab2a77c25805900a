#include "base/planted.h"
#include "engine/coded_plan.h"
#include "engine/coded_step.h"
#include "engine/commit_vote.h"
#include "engine/early_update.h"
#include "engine/freeze_watch.h"
#include "engine/operation_table.h"
#include "engine/optimizer_fit.h"
#include "engine/own_operations.h"
#include "engine/phase_clock.h"
#include "engine/replica_check.h"
#include "engine/residency_choice.h"
#include "engine/save_in_flight.h"
#include "engine/shard_group.h"
#include "engine/startup_check.h"
#include "engine/step_outcome.h"
#include "engine/step_warnings.h"
#include "engine/tensor_facts.h"
#include "engine/texts.h"
#include "engine/transfer_log.h"
#include "engine/uneven_join.h"
#include "zero/call_tags.h"
#include "zero/exchange_choice.h"

#include <kernels/common/dispatch.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/interrupt.h>
#include <zeroth/base/preemption.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/engine.h>

#include <sys/vfs.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>

namespace zeroth {

namespace {

/// Digest of every hyper-parameter.
std::int64_t digest_of(const std::vector<GroupHyper>& groups) {
  std::vector<double> values;
  for (const GroupHyper& group : groups) {
    values.insert(values.end(), {group.lr, group.beta1, group.beta2, group.eps, group.weight_decay, group.momentum,
                                 group.dampening, group.nesterov ? 1.0 : 0.0});
  }
  return static_cast<std::int64_t>(
      digest64({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double)}) >> 1U);
}

}  // namespace

Engine::Engine(std::vector<ParamSpec> params, std::vector<UnitSpec> units, EngineSettings settings, Device& device,
               std::shared_ptr<CommBackend> backend, ParameterBinder& binder, Logger logger)
    : settings_(std::move(settings)),
      device_(device),
      communicator_(std::move(backend)),
      binder_(binder),
      log_(std::move(logger)),
      optimizer_(optimizer_of(settings_)),
      pool_(std::make_unique<ThreadPool>(settings_.threads)),
      kernels_(settings_.own_kernels ? settings_.own_kernels(device, *pool_) : make_kernels(device, *pool_)),
      host_kernels_(kernels_->on_host() ? nullptr : make_host_kernels(device, *pool_, kernels::best_isa())),
      place_(mesh_place_of(settings_, communicator_.rank(), communicator_.size())),
      layout_(make_model_layout(with_separate_vectors(std::move(params), settings_), std::move(units),
                                degrees_of_groups(settings_, place_))),
      scaler_(settings_.loss_scaling),
      early_(std::make_unique<EarlyUpdate>()) {
  clock_ = std::make_unique<PhaseClock>();
  transfers_ = settings_.storage.now ? std::make_shared<TransferClock>(settings_.storage.now)
                                     : std::make_shared<TransferClock>();
  transfer_log_ = std::make_unique<TransferLog>();
  kernels::require_isa_override();
  if (kernels::best_isa() == kernels::Isa::kScalar) {
    log_.warn("kernels run scalar code, several times slower, with the same bits: " + kernels::describe_isa());
  }
  ZR_CHECK(settings_.micro_steps >= 1, ErrorCode::kUsage, "micro_steps must be at least 1", {.where = "engine"});
  for (const ParamSpec& param : layout_.params) {
    ZR_CHECK(param.group >= 0 && static_cast<std::size_t>(param.group) < settings_.groups.size(), ErrorCode::kUsage,
             "a parameter belongs to a parameter group that does not exist",
             {.where = "engine", .which = param.name, .got = std::to_string(param.group)});
  }
  build_groups();
  const bool host_updates = kernels_->on_host() || std::ranges::all_of(groups_, [](const auto& group) {
                              return group->spec().plan.residency.updates_cross_bus();
                            });
  ZR_CHECK(host_updates || optimizer_->runs_on_device(), ErrorCode::kUsage,
           "the optimizer has no kernel for the device of its states",
           {.where = "engine",
            .which = std::string(optimizer_->name()),
            .expected = zeroth::join(optimizer_names(), ", "),
            .hint = "or train it with its states in memory of the host: offload_optimizer.device = cpu"});
  require_possible(settings_, host_updates);
  require_optimizer_fits(settings_, *optimizer_, groups_, kernels_->on_host());
  require_codes_fit(settings_, *optimizer_, !kernels_->on_host());
  require_same_structure(groups_, settings_, place_, communicator_);
  for (const auto& group : groups_) require_parameter_slots(group->layout(), group->spec().plan);
  int reported = static_cast<int>(settings_.groups.size());
  for (std::size_t param = 0; param < layout_.params.size(); ++param) {
    if (layout_.params[param].trainable) reported = std::min(reported, layout_.params[param].group);
  }
  reported_group_ =
      static_cast<std::size_t>(reported) < settings_.groups.size() ? static_cast<std::size_t>(reported) : 0;
  if (const std::string lossy = optimizer_->lossy_part(); trains() && !lossy.empty())
    log_.progress("the run is lossy: optimizer " + std::string(optimizer_->name()) + ", " + lossy);
  if (const std::string lossy = lossy_part(settings_.plan.codes); !lossy.empty())
    log_.progress("the run is lossy: " + lossy);
  if (!trains())
    log_.progress("the model has no trainable parameter: the engine gathers and evaluates, and has no optimizer");
  residency_choice_ = choose_residency(groups_, settings_, *optimizer_, host_kernels(), device_, communicator_);
  settings_.plan = groups_.front()->spec().plan;
  if (!residency_choice_.empty()) log_.progress("states in files: " + residency_choice_);
  require_budgets(groups_, settings_, optimizer_->states(), communicator_);
  require_plan_fits(groups_, settings_, optimizer_->states(), communicator_);
  require_files_fit(groups_, settings_, optimizer_->states(), communicator_);
  warnings_ = std::make_unique<StepWarnings>(layout_, settings_.max_nonfinite_steps, rank(), log_);
  allocate_groups();
  open_activations();
}

void Engine::build_groups() {
  const std::vector<std::string> batch_axes = batch_axes_of(settings_, place_);
  data_ranks_ = place_.size(batch_axes);
  std::vector<std::string> others;
  for (const MeshAxis& axis : place_.spec().axes) {
    if (std::ranges::find(batch_axes, axis.name) == batch_axes.end()) others.push_back(axis.name);
  }
  leads_batch_ = place_.is_first(others);
  split_ = split_model(layout_, degrees_of_groups(settings_, place_));
  const ExchangeChoice exchange = choose_exchange(communicator_.backend().capabilities(), kernels_->memory());
  groups_ = make_shard_groups(split_, settings_, place_, world(),
                              {.asynchronous = device_.asynchronous(),
                               .narrow_buckets = exchange.narrow_buckets,
                               .beside_device = !kernels_->on_host(),
                               .messages = optimizer_->has_messages()});
  settings_.plan = groups_.front()->spec().plan;
}

StateFiles Engine::open_files() {
  const auto any = [this](Residency ResidencyPlan::* state) {
    return std::ranges::any_of(
        groups_, [&](const auto& group) { return group->spec().plan.residency.*state == Residency::kFiles; });
  };
  const StorageSettings& storage = settings_.storage;
  const std::vector<std::string>& of_parameters =
      storage.parameter_folders.empty() ? storage.folders : storage.parameter_folders;
  const bool optimizer = any(&ResidencyPlan::optimizer);
  const bool parameters = any(&ResidencyPlan::parameter);
  if (!optimizer && !parameters) return {};
  constexpr const char* kOptimizer = "/zero_optimization/offload_optimizer";
  constexpr const char* kParameters = "/zero_optimization/offload_param";
  if (optimizer) require_folder(storage.folders, kOptimizer);
  if (parameters) {
    const bool fallen_back = storage.parameter_folders.empty() && !storage.folders.empty();
    require_folder(of_parameters, fallen_back ? kOptimizer : kParameters);
  }
  const std::string& folder = (optimizer ? storage.folders : of_parameters).front();
  const IoQueueOptions options{
      .engine = storage.engine, .depth = storage.queue_depth, .watch = [this] { look_after_others(); }};
  return {.folders = storage.folders,
          .parameter_folders = of_parameters,
          .stripe_bytes = storage.stripe_bytes,
          .access = storage.access,
          .queue = storage.own_queue ? storage.own_queue(folder, options) : open_io_queue(folder, options),
          .clock = transfers_};
}

void Engine::look_after_others() {
  if (activity_) activity_->check();
  communicator_.backend().check_peers({.what = "states on their way between memory and files"});
}

void Engine::open_activations() {
  if (!settings_.activations) return;
  ActivationStoreOptions options = *settings_.activations;
  require_folder(options.folders, "/zeroth/activations");
  options.io.watch = [engine =
                          std::weak_ptr<Engine*>(self_)] {  // graphs may outlive the engine, and the store with them
    if (const auto there = engine.lock()) (*there)->look_after_others();
  };
  activations_ = ActivationStore::open(options);
  activations_hold_ = device_.ledger().hold({-1, MemoryState::kStaging}, settings_.activation_staging());
}

void Engine::say_where_files_are() {
  std::uint64_t bytes = 0;
  std::string access;
  for (const auto& group : groups_) {
    for (const BlockSet set : kBlockSets) {
      const StateStore* const store = group->memory().state_store(set);
      if (store == nullptr || store->file_access().empty()) continue;
      bytes += store->resting_bytes(Tier::kFiles);
      access = store->file_access();
    }
  }
  if (bytes == 0) return;
  const StorageSettings& storage = settings_.storage;
  std::vector<std::string> folders = storage.folders;
  folders.insert(folders.end(), storage.parameter_folders.begin(), storage.parameter_folders.end());
  log_.progress("files of this rank: " + format_bytes(bytes) + " in " + zeroth::join(folders, ":") + ", " + access +
                ", moved by " + std::string(resources_->files.queue->name()));
  for (const std::string& folder : folders) {
    struct statfs about{};
    constexpr decltype(about.f_type) kTmpfs = 0x01021994;
    if (::statfs(folder.c_str(), &about) != 0 || about.f_type != kTmpfs) continue;
    log_.warn("the folder " + folder + " is in memory (tmpfs): what rests there takes memory of the host");
  }
}

void Engine::set_activation_choice(std::string choice) {
  activation_choice_ = std::move(choice);
  log_.progress(activation_choice_);
}

void Engine::allocate_groups() {
  operations_ = std::make_unique<OperationTable>();
  own_ = std::make_unique<OwnOperations>(*this);
  const OperationNames names = [this](OperationId id) { return operations_->name(id); };
  communicator_.backend().set_tag_names(tag_names(layout_, settings_.plan.gathers_parameters(), names));
  resources_.reset(new GroupResources{.settings = settings_,
                                      .optimizer = *optimizer_,
                                      .device = device_,
                                      .kernels = *kernels_,
                                      .host_kernels = host_kernels(),
                                      .gather_stream = device_.make_stream("gather"),
                                      .reduce_stream = device_.make_stream("reduce"),
                                      .binder = binder_,
                                      .counters = counters_,
                                      .files = open_files()});
  bool shares_job = true;  // the first that can
  for (const auto& group : groups_) {
    group->connect(communicator_.shared_backend(), shares_job && group->has_all_ranks());
    shares_job = shares_job && !group->has_all_ranks();
    group->allocate(*resources_, own_->step, names);
    group->begin_round(committed_steps_);
  }
  if (optimizer_->has_facts()) {
    std::vector<std::string> tensors;
    for (const auto& group : groups_) std::ranges::copy(group->tensor_names(), std::back_inserter(tensors));
    const bool is_split = std::ranges::any_of(groups_, [](const auto& group) { return group->splits_tensors(); });
    tensor_facts_ = std::make_unique<TensorFacts>(communicator_, tensors, is_split);
    for (const auto& group : groups_) group->set_tensors(*tensor_facts_);
  }
  if (settings_.stragglers != 0) {
    require_code_fits(settings_, world(), data_ranks_, optimizer_->has_messages());
    code_ = std::make_unique<CodedStep>(communicator_, settings_.stragglers);
    for (const auto& group : groups_) group->gradients().steer(/*at_end=*/true);
  }
  if (optimizer_->freezing())
    freeze_watch_ = std::make_unique<FreezeWatch>(*optimizer_, settings_.groups, settings_.schedule.warmup_steps);
  say_what_is_not_pinned();
  say_where_files_are();
  uneven_join_ = std::make_unique<UnevenJoin>(communicator_, layout_, *operations_,
                                              UnevenJoin::BatchCalls{own_->batch, own_->no_batch},
                                              [this] { sync_groups(own_->batch, {}); });
  const bool any_reads_peers =
      std::ranges::any_of(groups_, [](const auto& group) { return group->gradients().reads_peers(); });
  for (const auto& owned : groups_) {
    ShardGroup& group = *owned;
    const auto number = [](const std::vector<int>& numbers, int index) {
      return numbers[static_cast<std::size_t>(index)];
    };
    group.parameters().set_before_gather([this, &group, number](int unit) {
      // By its first flat, which says the group too. A unit without parameters has nothing to gather.
      const std::vector<int>& flats = group.layout().unit_flats[static_cast<std::size_t>(unit)];
      if (!flats.empty()) uneven_join_->announce(own_->gather, number(group.part().flats, flats.front()));
    });
    group.gradients().set_before_reduce(
        [this, &group, number](int flat) { uneven_join_->announce(own_->reduce, number(group.part().flats, flat)); });
    if (!any_reads_peers) continue;
    // [Note: Matched gathers beside pulls] Where gathers are matched and reductions are not, a rank that blocks for
    // one of them must not owe the others its part in the other. One thread may serve both streams.
    group.parameters().set_before_blocking([stream = resources_->reduce_stream] { stream.synchronize(); });
    group.gradients().set_before_wait([this] {
      for (const auto& other : groups_) other->parameters().settle_gathers();
    });
  }
}

void Engine::say_what_is_not_pinned() const {
  for (const auto& group : groups_) {
    const DeviceBus* const bus = group->memory().bus();
    if (bus == nullptr || bus->refusal().empty()) continue;
    log_.warn("memory for copies to and from the device cannot be pinned, so these copies wait: " + bus->refusal());
    return;
  }
}

void Engine::set_activity(std::shared_ptr<RankActivity> activity) {
  activity_ = std::move(activity);
  if (!activity_) return;
  std::vector<std::string> units;
  for (const UnitSpec& unit : layout_.units) units.push_back(unit.name);
  watched_as_ = activity_->add_model(std::move(units));
}

Engine::~Engine() {
  finish_save();
  follower_.reset();
  groups_.clear();
  communicator_.backend().set_tag_names({});  // they speak of this engine's layout
}

void Engine::initialize(const std::function<ConstTensorView(int)>& values,
                        const std::function<void(std::span<const int> params)>& release) {
  for (const auto& group : groups_) {
    const int differing = group->initialize(values, release, *resources_);
    if (differing >= 0) {
      log_.warn("initial values differed from rank 0's (first in unit " +
                layout_.units[static_cast<std::size_t>(differing)].name + "); rank 0's are used");
    }
    construction_peak_ = std::max<std::uint64_t>(construction_peak_, group->staging_bytes());
  }
  device_.ledger().reset_peak();
}

Invocation Engine::begin_forward(int unit, bool evaluates) {
  return {unit, ++forward_seq_, micro_step_, evaluates};
}

void Engine::pre_forward(const Invocation& use) {
  enter(use.evaluates ? Phase::kEvaluation : Phase::kForward, use.unit);
  look_at_files();
  require_whole("a forward");
  for (const PartIndex part : parts_of(use.unit)) {
    const auto [group, unit] = at(part);
    group.require_usable(unit);
    group.uses().pre_forward(unit);
  }
}

void Engine::post_forward(const Invocation& use, bool awaits_backward) {
  for (const PartIndex part : parts_of(use.unit)) {
    const auto [group, unit] = at(part);
    group.uses().post_forward(unit, awaits_backward);
  }
}

void Engine::drop_forward(const Invocation& use) noexcept {
  for (const PartIndex part : parts_of(use.unit)) {
    const auto [group, unit] = at(part);
    group.uses().drop_forward(unit);
  }
}

void Engine::pre_backward(int unit) {
  uneven_join_->announce_backward(own_->backward);
  enter(Phase::kBackward, unit);
  look_at_files();
  begin_early_update();
  advance_early_update();
  for (const PartIndex part : parts_of(unit)) {
    const auto [group, index] = at(part);
    group.require_usable(index);
    group.uses().pre_backward(index);
  }
}

void Engine::post_backward(int unit) {
  look_at_files();
  for (const PartIndex part : parts_of(unit)) {
    const auto [group, index] = at(part);
    group.uses().post_backward(index);
    if (updates_early() && group.uses().gradients_complete(index)) group.end_use(index);
  }
  advance_early_update();
}

void Engine::grad_ready(int param, ConstTensorView grad) {
  ZR_CHECK(layout_.params[static_cast<std::size_t>(param)].trainable, ErrorCode::kUsage,
           "a gradient of a parameter that never trains",
           {.where = "engine.backward", .which = layout_.params[static_cast<std::size_t>(param)].name});
  uneven_join_->announce_backward(own_->backward);
  begin_early_update();
  const auto [group, index] = param_at(param);
  group.gradients().add(index, grad);
  group.uses().count_gradient(index);
  const int unit = group.layout().places[static_cast<std::size_t>(index)].unit;
  if (group.uses().gradients_complete(unit)) group.gradients().close_unit(unit, updates_early());
  advance_early_update();
}

void Engine::expect_gradient(int param, bool expected) {
  const auto [group, index] = param_at(param);
  group.uses().expect_gradient(index, expected);
}

void Engine::end_gradients(int unit) {
  for (const PartIndex part : parts_of(unit)) {
    const auto [group, index] = at(part);
    if (!group.uses().gradients_complete(index)) group.gradients().end_unit(index, group.uses().expected());
  }
}

bool Engine::gradients_complete(int unit) const {
  return std::ranges::all_of(parts_of(unit), [this](PartIndex part) {
    const auto [group, index] = at(part);
    return group.uses().gradients_complete(index);
  });
}

void Engine::end_backward() {
  enter(Phase::kAfterBackward);
  uneven_join_->announce_backward(own_->backward);
  gradient_factor_.reset();
  for (const auto& group : groups_) group->end_backward();
  if (!backward_failed_) advance_early_update();
  had_backward_ = true;
  ++backwards_;
}

void Engine::abandon(bool in_backward) {
  for (const auto& group : groups_) group->uses().release_all();
  if (!in_backward) return;
  backward_failed_ = true;
  end_backward();
}

bool Engine::trains() const {
  return std::ranges::any_of(layout_.params, [](const ParamSpec& param) { return param.trainable; });
}

StepResult Engine::step() {
  if (std::exchange(joins_short_step_, false)) return end_accumulation();
  ZR_CHECK(
      trains(), ErrorCode::kUsage, "step() of a model that has no trainable parameter",
      {.where = "engine.step",
       .got = std::to_string(layout_.params.size()) + " parameters, all frozen",
       .hint = "set requires_grad on what should be trained, or name it in a parameter group, before the engine is "
               "built"});
  // All ranks have the same configuration, and run the same front end.
  ZR_CHECK(!activations_ || activations_.use_count() > 1, ErrorCode::kConfig,
           "saved tensors should rest in files, and the program moves none",
           {.where = "engine.step",
            .which = "/zeroth/activations/device",
            .expected = "a front end that took Engine::activations()",
            .hint = "zeroth.Engine of Python moves them; a C++ program gives the store to libtorch::SavedTensors"});
  report_failed_save();
  require_not_torn("step()");
  require_own_weights("step()");
  enter(Phase::kStep);
  uneven_join_->announce(own_->step);
  uneven_join_->forget_backward();
  // Where the others wait for this rank, they hear of it from the commit vote.
  const bool complete = micro_step_ + 1 == settings_.micro_steps;
  const bool ends = ends_step();
  const bool votes = world() > 1 && ends;
  if (!had_backward_ && !votes) throw_idle(rank(), world());
  const bool idle = !std::exchange(had_backward_, false);
  if (!ends) {
    ++micro_step_;
    for (const auto& group : groups_) group->gradients().set_micro_step(micro_step_);
    enter(Phase::kBetweenSteps);
    return {.step = committed_steps_, .lr = learning_rates()[reported_group_]};
  }
  micro_step_ = 0;
  if (code_) code_->announce(complete);
  // With a gradient code each chunk of the batch counts once.
  StepResult result = together([&] { return finish_step(idle, code_ ? 1 : settings_.micro_steps); });
  transfer_log_->end_step(transfer_totals());
  ++boundaries_;
  if (activity_) activity_->finish_step(committed_steps_);
  enter(Phase::kBetweenSteps);
  return result;
}

bool Engine::ends_step() {
  return micro_step_ + 1 == settings_.micro_steps || (code_ && code_->is_decided());
}

std::vector<int> Engine::chunks() const {
  return code_ ? code_->chunks() : std::vector<int>{};
}

int Engine::choose_summed(std::vector<int>& left_out) {
  if (!code_) return -1;
  CodedStep::Summed summed = code_->end();
  if (!summed.own) {
    for (const auto& group : groups_) group->gradients().leave_out();
  }
  left_out = std::move(summed.left_out);
  return summed.missing;
}

void Engine::steer(std::vector<int> gathers) {
  ZR_ASSERT(gathers.size() == layout_.units.size(), "a number of gathers for each unit");
  ZR_CHECK(!settings_.update.inside_backward, ErrorCode::kConfig,
           "an update inside backward where backwards come in parts",
           {.where = "engine",
            .which = "/zeroth/update/inside_backward",
            .expected = "no pipeline",
            .hint = "leave it out: stages sum their gradients at the end of the step"});
  gathers_ = std::move(gathers);
  for (const auto& group : groups_) group->gradients().steer(group->spans_stages());
}

void Engine::begin_part(const BackwardPart& part) {
  for (const auto& group : groups_) group->gradients().begin_part(part.micro_step);
  for (const auto& [units, last] : {std::pair(part.units, false), std::pair(part.last, true)}) {
    for (const int unit : units) {
      for (const PartIndex place : parts_of(unit)) {
        const auto [group, index] = at(place);
        group.gradients().add_to_part(index, last);
      }
    }
  }
}

StepResult Engine::step_all() {
  micro_step_ = settings_.micro_steps - 1;
  backwards_ = settings_.micro_steps;  // in how many parts is the front end's affair
  return step();
}

void Engine::keep_gathered(int unit) {
  for (const PartIndex part : parts_of(unit)) {
    const auto [group, index] = at(part);
    group.uses().keep(index);
  }
}

void Engine::give_back(int unit) {
  for (const PartIndex part : parts_of(unit)) {
    const auto [group, index] = at(part);
    group.uses().give_back(index);
  }
}

bool Engine::holds(int unit) const {
  return std::ranges::any_of(parts_of(unit), [this](const PartIndex part) {
    const auto [group, index] = at(part);
    return group.uses().holds(index);
  });
}

CommitVote Engine::cast_vote(bool idle, bool discards) {
  for (const auto& group : groups_) group->complete_step();

  StepTimes times = clock_->take(waited());
  if (boundaries_ == 0) times = {};  // building the model is no part of a step
  const int joined = uneven_join_->take_joined();
  Ballot ballot{.groups = digest_of(settings_.groups),
                .failed = backward_failed_,
                .idle = idle,
                .backwards = std::exchange(backwards_, 0),
                .preempted = preemption_requested(),
                .times = times,
                .joined = leads_batch_ ? joined : 0,
                .out = joined > 0,
                .discards = discards,
                .save_ended = saving_ && saving_->has_ended(),
                .save_failed = saving_ && saving_->has_failed(),
                .updated = early_->begun && !early_->is_delayed,
                .trains = {},
                .writes = {}};
  std::vector<GroupColors> colors;
  for (const auto& group : groups_) {
    group->add_norm(ballot.norm, data_ranks_);
    ballot.trains.push_back(digest_of(group->trained()));
    ballot.writes.push_back(digest_of(group->writes()));
    colors.push_back(group->colors());
    Offender offender = group->gradients().offender();
    if (offender.param >= 0) offender.param = group->part().params[static_cast<std::size_t>(offender.param)];
    if (offender.param >= 0 && (ballot.offender.param < 0 || offender.micro_step < ballot.offender.micro_step))
      ballot.offender = offender;
    const std::vector<bool> has_grad = group->has_grad();
    if (group->has_all_ranks()) {
      ballot.has_grad.insert(ballot.has_grad.end(), has_grad.begin(), has_grad.end());
    } else {
      group->set_has_grad_anywhere(on_any_rank(has_grad, group->communicator()));
    }
  }
  CommitVote vote = take_commit_vote(ballot, communicator_, colors);
  if (code_) vote.uneven_rank = -1;  // as many as each could
  auto next = vote.has_grad.begin();
  for (const auto& group : groups_) {
    if (!group->has_all_ranks()) continue;
    const auto end = next + static_cast<std::ptrdiff_t>(group->part().params.size());
    group->set_has_grad_anywhere({next, end});
    next = end;
  }
  return vote;
}

std::string Engine::name_of_offender(const CommitVote& vote) const {
  if (vote.offender_rank < 0) return "";
  std::string name;  // ranks may have other parameters: the one whose it is says its name
  if (vote.offender_rank == rank()) name = layout_.params[static_cast<std::size_t>(vote.offender.param)].name;
  return broadcast_text(std::move(name), vote.offender_rank, communicator_);
}

void Engine::forget_gradients() {
  for (const auto& group : groups_) {
    group->gradients().begin_step();
    group->forget_ended();
  }
  if (!early_->is_delayed) early_->terms.reset();
  early_->begun = false;
  early_->has_absent = false;
  gradient_factor_.reset();
  backward_failed_ = false;
  for (const auto& group : groups_) group->begin_round(committed_steps_);
}

void Engine::take_writes() {
  for (const auto& group : groups_) group->take_writes();
}

OwnTerms Engine::own_terms(int group) const {
  const ShardGroup& one = *groups_[static_cast<std::size_t>(group)];
  return {.groups = settings_.groups,
          .params = one.layout().params,
          .trains = one.trained(),
          .writes = one.writes(),
          .colors = one.colors(),
          .communicator = one.communicator(),
          .rank = rank()};
}

void Engine::set_writes(std::span<const std::pair<int, std::int64_t>> writes) {
  for (const auto& group : groups_) group->forget_writes();
  for (const auto& [param, digest] : writes) {
    const auto [group, index] = param_at(param);
    group.set_write(index, digest);
  }
}

void Engine::require_same_writes() {
  if (world() == 1 || settings_.plan.gathers_parameters()) return;  // where parameters are gathered writes are refused
  std::vector<std::int64_t> digests;
  std::vector<GroupColors> colors;
  for (const auto& group : groups_) {
    digests.push_back(digest_of(group->writes()));
    colors.push_back(group->colors());
  }
  const OtherWrites found = compare_writes(digests, communicator_, colors);
  if (found.odd >= 0) throw_other_writes(found, own_terms(found.group), world());
}

StepResult Engine::finish_step(bool idle, int micro_steps) {
  if (planted("leaked_buffer")) {
    constexpr std::size_t kLeaked = std::size_t{64} << 10U;
    Arena arena = device_.make_arena(ArenaKind::kPrivate, kLeaked, "leaked");
    auto* const leaked = new Buffer(arena.allocate(kLeaked, {-1, MemoryState::kReduced}, device_.ledger()));
    std::memset(leaked->data(), 1, leaked->size());
  }
  ZR_FAILPOINT("engine.vote");
  std::vector<int> left_out;
  const int missing = choose_summed(left_out);
  const CommitVote vote = cast_vote(idle, /*discards=*/false);
  early_->is_torn = vote.updated_rank >= 0;  // until it is committed
  std::exception_ptr failure;
  bool changed = early_->is_delayed;
  update_guarded(failure, [this] { finish_delayed_update(); });
  if (vote.refused() && changed) {
    publish_guarded(failure);
    settle_update(failure);
  }
  if (vote.refused()) forget_gradients();
  if (vote.refused()) require_committed(vote, {});
  throw_if_refused(vote, own_terms(vote.refused_group()), communicator_);
  if (missing >= 0 && vote.failed_rank < 0) {
    forget_gradients();
    throw_none_complete(missing, settings_, world());
  }

  warnings_->look_at(vote, committed_steps_, boundaries_ > 0);
  const bool by_previous_norm = settings_.update.clip_by == ClipBy::kPreviousNorm;
  const bool has_own_norms = groups_.front()->has_own_norms();
  StepResult result = outcome_of(vote, {.settings = settings_,
                                        .data_ranks = data_ranks_,
                                        .micro_steps = micro_steps,
                                        .offender = name_of_offender(vote),
                                        .committed = committed_steps_,
                                        .reported_group = reported_group_,
                                        .loss_scale = scaler_.scale(),
                                        // The root of the mean of the squares of all ranks' own norms: never below the
                                        // norm of their mean.
                                        .norm_factor = has_own_norms ? std::sqrt(data_ranks_) : 1.0,
                                        .clip_norm = by_previous_norm ? early_->last_norm : std::nullopt});
  result.left_out = std::move(left_out);
  if (vote.updated_rank >= 0 && !result.reason.empty()) forget_gradients();
  require_committed(vote, result);
  if (result.reason.empty()) {
    const UpdateTerms terms{.factor = mean_factor(result.batches) * result.clip_coefficient / result.loss_scale,
                            .groups = settings_.groups,
                            .lr_factor = settings_.schedule.factor(committed_steps_)};
    result.delayed = settings_.update.delayed_after && committed_steps_ >= *settings_.update.delayed_after;
    update_guarded(failure, [&] {
      for (const auto& group : groups_) group->share_sums();
      ZR_FAILPOINT("engine.update");
      if (result.delayed) return delay_update(terms);
      for (const auto& group : groups_) group->exchange_messages(terms);
      measure_tensors(terms);
      for (const auto& group : groups_) group->update(terms);
    });
    changed = true;
  }
  if (changed) {
    publish_guarded(failure);
    update_guarded(failure, [] { ZR_FAILPOINT("engine.committed"); });
    settle_update(failure);
  }
  result.changed = changed;
  dropped_in_a_row_ = 0;
  if (result.reason.empty()) {
    result.committed = true;
    result.messages = has_own_norms;
    result.step = ++committed_steps_;
    if (by_previous_norm) early_->last_norm = result.grad_norm;
    early_->is_torn = false;
    look_at_variances();
  }
  for (const auto& group : groups_) {
    const int wide = group->gradients().first_wide();
    warnings_->look_at_wide_gradient(wide < 0 ? wide : group->part().params[static_cast<std::size_t>(wide)]);
  }
  forget_gradients();
  if (settings_.compare_replicas && changed)
    require_same_replicas(groups_, result.messages, communicator_, *kernels_, resources_->gather_stream);
  const bool overflowed = result.cause == SkipCause::kOverflow;
  const bool scale_fell_enough = result.cause == SkipCause::kFailedBackward || scaler_.update(overflowed);
  if (!result.committed) {
    log_.progress(
        "step skipped on all ranks: " + result.reason +
        (overflowed ? "; loss scale " + scale_text(result.loss_scale) + " -> " + scale_text(scaler_.scale()) : ""));
  }
  if (!scale_fell_enough) throw_at_smallest_scale(result);
  settle_save(vote);
  warnings_->count(result);
  if (follower_ && result.committed) follower_->after_step(result);
  return result;
}

void Engine::look_at_variances() {
  if (!freeze_watch_) return;
  const std::string said =
      freeze_watch_->after_update(committed_steps_, groups_, communicator_, *kernels_, resources_->gather_stream);
  if (!said.empty()) log_.progress(said);
}

void Engine::measure_tensors(const UpdateTerms& terms) {
  if (!tensor_facts_) return;
  tensor_facts_->begin(optimizer_->facts(committed_steps_));
  for (const auto& group : groups_) group->measure(terms, *tensor_facts_);
  tensor_facts_->combine();
  for (const auto& group : groups_) group->conclude(terms, *tensor_facts_);
}

void Engine::publish_updates() {
  ZR_FAILPOINT("engine.publish");
  resources_->gather_stream.order_after(resources_->reduce_stream.record());  // of the update, on a device
  for (const auto& group : groups_) group->parameters().publish();
  kernels_->settle(resources_->gather_stream);
}

void Engine::enter(Phase phase, int unit) noexcept {
  if (activity_) activity_->enter(phase, watched_as_, unit);
  clock_->turn(phase, waited());
  if (!transfers_->keeps_spans()) return;
  try {
    transfer_log_->enter(transfers_->now(), phase, unit);
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): a gap in a timeline
  }
}

void Engine::look_at_files() const {
  if (resources_->files.queue) resources_->files.queue->progress();
}

void Engine::set_group(int group, const GroupHyper& hyper) {
  ZR_CHECK(group >= 0 && static_cast<std::size_t>(group) < settings_.groups.size(), ErrorCode::kUsage,
           "there is no such parameter group",
           {.where = "engine.set_group",
            .expected = "0 to " + std::to_string(settings_.groups.size() - 1),
            .got = std::to_string(group)});
  ZR_CHECK(
      hyper.momentum == 0.0 || settings_.optimizer.momentum || settings_.optimizer.type != "SGD", ErrorCode::kUsage,
      "the optimizer keeps no momentum, and a parameter group asks for it",
      {.where = "engine.set_group",
       .which = "momentum of parameter group " + std::to_string(group),
       .expected = "0",
       .got = std::to_string(hyper.momentum),
       .hint = "with optimizer.params.momentum above 0 in the configuration SGD keeps momenta from the beginning"});
  GroupHyper& own = settings_.groups[static_cast<std::size_t>(group)];
  ZR_CHECK(!early_->begun || early_->is_delayed || hyper == own, ErrorCode::kUsage,
           "hyper-parameters change while the update with them runs",
           {.where = "engine.set_group",
            .which = "parameter group " + std::to_string(group),
            .expected = "a change before the last backward of a step, or after step()",
            .hint = "with zeroth.update.inside_backward learning rates are taken at the beginning of backward"});
  own = hyper;
}

std::vector<double> Engine::learning_rates() const {
  const double factor = settings_.schedule.factor(committed_steps_);
  std::vector<double> rates;
  for (const GroupHyper& group : settings_.groups) rates.push_back(group.lr * factor);
  return rates;
}

OperationId Engine::add_operation(Operation row) {
  return operations_->add(std::move(row));
}

void Engine::sync(OperationId what, std::string_view name) {
  const std::uint64_t before = activity_ ? activity_->entered() : 0;
  enter(Phase::kSyncPoint);
  // The names of those that have a batch are in what they announce.
  const bool all = uneven_join_->num_out() == 0;
  uneven_join_->announce(what, name.empty() ? -1 : static_cast<int>(digest64(name) >> 33U));
  sync_groups(what, all ? name : std::string_view());
  if (activity_) activity_->resume(before);
}

void Engine::sync_groups(OperationId what, std::string_view name) {
  for (const auto& group : groups_) group->gradients().sync(what, name);
}

// One-sided sync points know what kind of call it is, and no more: names are compared by a matched one.
void Engine::compare_names(OperationId what, std::string_view name) {
  if (world() > 1 && communicator_.backend().capabilities().one_sided) communicator_.barrier(name, tag_of(what));
}

double Engine::sum_over_ranks(double value, std::string_view name) {
  together([&] {
    sync(own_->average, name);
    if (!name.empty() && uneven_join_->num_out() == 0) compare_names(own_->average, name);
    communicator_.all_reduce(std::span(&value, 1));
  });
  return value;
}

double Engine::average(double value, std::string_view name) {
  return sum_over_ranks(value, name) / static_cast<double>(world() - uneven_join_->num_out());
}

void Engine::barrier(std::string_view name) {
  together([&] {
    sync(own_->barrier, name);
    compare_names(own_->barrier, uneven_join_->num_out() == 0 ? name : std::string_view());
  });
}

void Engine::begin_epoch() {
  if (world() == 1) return;
  uneven_join_->forget_backward();
  if (uneven_join_->num_out() == 0) return;
  together([&] { uneven_join_->announce(own_->epoch); });
  end_uneven_join();
}

void Engine::forget_order() {
  for (const auto& group : groups_) group->parameters().forget_order();
}

void Engine::end_uneven_join() {
  uneven_join_->end();
  forget_order();
}

bool Engine::next_batch(bool has_batch, const JoinedCalls& calls) {
  Next next = begin_batch(has_batch);
  for (; next == Next::kStep; next = join()) calls.step ? calls.step() : static_cast<void>(step());
  return next == Next::kBatch;
}

Next Engine::begin_batch(bool has_batch) {
  if (world() == 1) return has_batch ? Next::kBatch : Next::kEnd;
  return together([&] {
    uneven_join_->forget_backward();
    uneven_join_->begin_batch(has_batch);
    const int out = uneven_join_->num_out();
    if (out == 0) return Next::kBatch;
    early_->has_absent = true;
    if (out < world() && settings_.uneven == Uneven::kJoin) {
      forget_order();
      return has_batch ? Next::kBatch : follow();
    }
    const std::vector<int> without = uneven_join_->out();
    end_uneven_join();
    if (out < world() && settings_.uneven == Uneven::kError) throw_uneven(without, committed_steps_, communicator_);
    return Next::kEnd;
  });
}

Next Engine::join() {
  return together([&] { return follow(); });
}

Next Engine::follow() {
  enter(Phase::kSyncPoint);
  for (const auto& group : groups_) group->complete_uses();
  while (true) {
    const std::optional<Announcement> said = uneven_join_->listen();
    if (!said) continue;
    uneven_join_->require_joinable(said->call);
    if (const std::optional<Next> next = operations_->find(said->call)->join(said->subject)) return *next;
  }
}

void Engine::part() noexcept {
  if (world() == 1 || std::exchange(parted_, true)) return;
  communicator_.backend().abort(
      Error(ErrorCode::kAborted, interrupted_text(),
            {.where = "engine", .who = "rank " + std::to_string(rank()) + "/" + std::to_string(world())}));
}

void Engine::require_not_parted() const {
  ZR_CHECK(
      !parted_, ErrorCode::kAborted, "an earlier call of all ranks was interrupted on this rank",
      {.where = "engine",
       .who = "rank " + std::to_string(rank()) + "/" + std::to_string(world()),
       .hint = "the ranks are no longer at one place, and the others have been told: end the job and start it again"});
}

void Engine::read_flat(int flat, std::byte* out) {
  const auto [group, index] = flat_at(flat);
  group.parameters().read(index, out);
}

MemoryReport Engine::memory_report() const {
  MemoryReport report{.measured_peak = device_.ledger().at_peak(),
                      .live = device_.ledger().live(),
                      .construction_peak = construction_peak_,
                      .live_gathered_peak = counters_.live_bytes_peak,
                      .live_slots_peak = counters_.live_slots_peak,
                      .overflow_slots = counters_.overflow_slots,
                      .order_deviations = counters_.order_deviations,
                      .demand_fetches = counters_.demand_fetches,
                      .transport = communicator_.backend().memory_bytes(),
                      .pss = pss_bytes(),
                      .checkpoint_copy = checkpoint_copy_.capacity(),
                      .residency_choice = residency_choice_,
                      .activation_choice = activation_choice_};
  report.planned.bytes[static_cast<std::size_t>(MemoryState::kStaging)] += settings_.activation_staging();
  if (follower_) report.planned.bytes[static_cast<std::size_t>(MemoryState::kStaging)] += follower_->held_bytes();
  if (activations_) report.activation_files = activations_->measured_file_bytes();
  for (const auto& group : groups_) {
    report.planned += group->planned_memory(group->spec().plan, optimizer_->states(), settings_.micro_steps);
    report.planned.bytes[static_cast<std::size_t>(MemoryState::kOptimizer)] += group->memory().added_bytes();
    report.planned_files +=
        group->planned_files(optimizer_->states(), settings_.micro_steps, settings_.storage.stripe_bytes);
    for (const BlockSet set : kBlockSets) {
      if (const StateStore* store = group->memory().state_store(set))
        report.measured_files += store->measured_file_bytes();
    }
    if (const DeviceBus* const bus = group->memory().bus()) {
      report.bus_down += bus->counters().down;
      report.bus_up += bus->counters().up;
    }
    report.spills += group->gradients().spills();
    report.resident += group->resident_bytes();
    report.transport += group->transport_bytes();
  }
  if (code_) report.transport += code_->transport_bytes();
  return report;
}

std::vector<int> Engine::gathers_of(const ShardGroup& group) const {
  std::vector<int> gathers;
  if (gathers_.empty()) return gathers;
  for (const int unit : group.part().units) gathers.push_back(gathers_[static_cast<std::size_t>(unit)]);
  return gathers;
}

WireBytes Engine::planned_wire() const {
  WireBytes wire;
  for (const auto& group : groups_)
    wire += group->replaced_by_messages(
        plan_wire(group->layout(), group->spec().plan, group->rank(), settings_.micro_steps, gathers_of(*group)));
  return wire;
}

TransferTotals Engine::transfer_totals() const {
  look_at_files();
  TransferTotals totals{.states = transfers_->times()};
  for (const auto& group : groups_) {
    for (const BlockSet set : kBlockSets) {
      if (const StateStore* store = group->memory().state_store(set))
        totals.sets[static_cast<std::size_t>(set)] += store->counters();
    }
  }
  if (!activations_) return totals;
  totals.activations = activations_->transfers();
  totals.activations_times = activations_->times();
  return totals;
}

TransferReport Engine::transfer_report() const {
  TransferReport report = transfer_log_->report(transfer_totals());
  for (const BlockSet set : kBlockSets) {
    FileTraffic planned;
    for (const auto& group : groups_)
      planned += group->planned_file_traffic(set, optimizer_->states(), settings_.micro_steps, gathers_of(*group),
                                             optimizer_->has_facts() ? 2 : 1);
    if (planned.read_bytes + planned.write_bytes > 0) report.rows[static_cast<std::size_t>(set)].planned = planned;
  }
  const auto has_files = [this](const TransferRow& row) {
    return row.planned || (row.set == "activations" && activations_);
  };
  std::erase_if(report.rows, [&](const TransferRow& row) { return !has_files(row); });
  return report;
}

void Engine::trace_transfers(bool on) {
  constexpr std::size_t kMost = std::size_t{1} << 16U;
  const std::size_t most = on ? kMost : 0;
  transfers_->keep_spans(most);
  transfer_log_->keep_phases(most);
  if (activations_) activations_->keep_spans(most);
}

std::string Engine::transfer_trace() const {
  std::vector<TransferSpan> spans = transfers_->spans();
  if (activations_) {
    const std::vector<TransferSpan> more = activations_->spans();
    spans.insert(spans.end(), more.begin(), more.end());
  }
  std::vector<std::string> units;
  for (const UnitSpec& unit : layout_.units) units.push_back(unit.name);
  return chrome_trace(transfer_log_->marks(), spans, units, rank(), transfers_->now());
}

void Engine::reset_peaks() {
  transfer_log_->reset(transfer_totals());
  device_.ledger().reset_peak();
  counters_.reset_peaks();
}

}  // namespace zeroth
