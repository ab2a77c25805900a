#include "base/planted.h"
#include "engine/commit_vote.h"
#include "engine/initial_values.h"
#include "engine/operation_table.h"
#include "engine/own_operations.h"
#include "engine/phase_clock.h"
#include "engine/startup_check.h"
#include "engine/step_outcome.h"
#include "engine/step_warnings.h"
#include "engine/uneven_join.h"
#include "engine/unit_uses.h"
#include "engine/updater.h"
#include "zero/call_tags.h"
#include "zero/gradient_store.h"

#include <kernels/common/dispatch.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/base/preemption.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/engine.h>

#include <algorithm>
#include <cstring>
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
      optimizer_(settings_.own_optimizer ? settings_.own_optimizer() : make_optimizer(settings_.optimizer)),
      pool_(std::make_unique<ThreadPool>(settings_.threads)),
      layout_(make_model_layout(std::move(params), std::move(units), settings_.plan.degrees(communicator_.size()))) {
  clock_ = std::make_unique<PhaseClock>();
  kernels::require_isa_override();
  if (kernels::best_isa() == kernels::Isa::kScalar) {
    log_.warn("kernels run scalar code, several times slower, with the same bits: " + kernels::describe_isa());
  }
  settings_.plan.validate();
  if (!device_.asynchronous())
    settings_.plan.prefetch_units = 0;  // nothing goes ahead of the caller there: no slot for it
  ZR_CHECK(settings_.micro_steps >= 1, ErrorCode::kUsage, "micro_steps must be at least 1", {.where = "engine"});
  for (const ParamSpec& param : layout_.params) {
    ZR_CHECK(param.group >= 0 && static_cast<std::size_t>(param.group) < settings_.groups.size(), ErrorCode::kUsage,
             "a parameter belongs to a parameter group that does not exist",
             {.where = "engine", .which = param.name, .got = std::to_string(param.group)});
  }
  require_same_structure(layout_, settings_, communicator_);
  int reported = static_cast<int>(settings_.groups.size());
  for (std::size_t param = 0; param < layout_.params.size(); ++param) {
    if (layout_.params[param].trainable) reported = std::min(reported, layout_.params[param].group);
  }
  reported_group_ =
      static_cast<std::size_t>(reported) < settings_.groups.size() ? static_cast<std::size_t>(reported) : 0;
  if (!trains())
    log_.progress("the model has no trainable parameter: the engine gathers and evaluates, and has no optimizer");
  require_plan_fits(layout_, settings_, optimizer_->states(), communicator_);
  warnings_ = std::make_unique<StepWarnings>(layout_, settings_.max_nonfinite_steps, rank(), log_);
  build_stores();
}

void Engine::build_stores() {
  CommBackend& backend = communicator_.backend();
  operations_ = std::make_unique<OperationTable>();
  own_ = std::make_unique<OwnOperations>(*this);
  const OperationNames names = [this](OperationId id) { return operations_->name(id); };
  backend.set_tag_names(tag_names(layout_, names));
  const std::vector<StateDeclaration> states = optimizer_->states();
  const KernelContext kernels{pool_.get(), kernels::best_isa()};
  memory_ = std::make_unique<ModelMemory>(layout_, settings_.plan, states, settings_.micro_steps, device_, backend);
  const Stream reduce_stream = device_.make_stream("reduce");
  parameters_ = std::make_unique<ParameterStore>(layout_, settings_.plan, *memory_, backend, device_,
                                                 device_.make_stream("gather"), kernels, binder_);
  gradients_ = std::make_unique<GradientStore>(layout_, settings_.plan, settings_.micro_steps, *memory_, backend,
                                               reduce_stream, kernels, device_.ledger());
  updater_ = std::make_unique<Updater>(layout_, *optimizer_, *memory_, backend, kernels);
  gradients_->set_operations(own_->step, names);
  uneven_join_ = std::make_unique<UnevenJoin>(communicator_, layout_, *operations_,
                                              UnevenJoin::BatchCalls{own_->batch, own_->no_batch},
                                              [this] { gradients_->sync(own_->batch); });
  parameters_->set_before_gather([this](int unit) { uneven_join_->announce(own_->gather, unit); });
  if (gradients_->reads_peers()) {
    // [Note: Matched gathers beside pulls] Where gathers are matched and reductions are not, a rank that blocks for
    // one of them must not owe the others its part in the other. One thread may serve both streams.
    parameters_->set_before_blocking([reduce_stream] { reduce_stream.synchronize(); });
    gradients_->set_before_wait([this] { parameters_->settle_gathers(); });
  }
  gradients_->set_before_reduce([this](int flat) { uneven_join_->announce(own_->reduce, flat); });
  uses_ = std::make_unique<UnitUses>(layout_, settings_.plan, *parameters_);
  trained_ = uses_->expected();
}

void Engine::set_activity(std::shared_ptr<RankActivity> activity) {
  activity_ = std::move(activity);
  if (!activity_) return;
  std::vector<std::string> units;
  for (const UnitSpec& unit : layout_.units) units.push_back(unit.name);
  watched_as_ = activity_->add_model(std::move(units));
}

Engine::~Engine() {
  uses_.reset();
  communicator_.backend().set_tag_names({});  // they speak of this engine's layout
}

void Engine::initialize(const std::function<ConstTensorView(int)>& values, const std::function<void(int)>& release) {
  InitialValues initial(layout_, *memory_, device_, communicator_);
  const int differing = initial.bring(values, release);
  if (differing >= 0) {
    log_.warn("initial values differed from rank 0's (first in unit " +
              layout_.units[static_cast<std::size_t>(differing)].name + "); rank 0's are used");
  }
  construction_peak_ = initial.staging_bytes();
  device_.ledger().reset_peak();
  parameters_->publish();
  if (settings_.plan.gathers_parameters()) return;
  for (std::size_t flat = 0; flat < layout_.flats.size(); ++flat) {
    binder_.bind(static_cast<int>(flat), memory_->parameters(static_cast<int>(flat)));
  }
}

Invocation Engine::begin_forward(int unit, bool evaluates) {
  return {unit, ++forward_seq_, micro_step_, evaluates};
}

void Engine::pre_forward(const Invocation& use) {
  enter(use.evaluates ? Phase::kEvaluation : Phase::kForward, use.unit);
  uses_->pre_forward(use.unit);
}

void Engine::post_forward(const Invocation& use, bool awaits_backward) {
  uses_->post_forward(use.unit, awaits_backward);
}

void Engine::drop_forward(const Invocation& use) noexcept {
  uses_->drop_forward(use.unit);
}

void Engine::pre_backward(int unit) {
  uneven_join_->announce_backward(own_->backward);
  enter(Phase::kBackward, unit);
  uses_->pre_backward(unit);
}

void Engine::post_backward(int unit) {
  uses_->post_backward(unit);
}

void Engine::grad_ready(int param, ConstTensorView grad) {
  ZR_CHECK(layout_.params[static_cast<std::size_t>(param)].trainable, ErrorCode::kUsage,
           "a gradient of a parameter that never trains",
           {.where = "engine.backward", .which = layout_.params[static_cast<std::size_t>(param)].name});
  uneven_join_->announce_backward(own_->backward);
  gradients_->add(param, grad);
  uses_->count_gradient(param);
  const int unit = layout_.places[static_cast<std::size_t>(param)].unit;
  if (uses_->gradients_complete(unit)) gradients_->close_unit(unit);
}

void Engine::expect_gradient(int param, bool expected) {
  uses_->expect_gradient(param, expected);
}

void Engine::end_gradients(int unit) {
  if (!gradients_complete(unit)) gradients_->end_unit(unit, uses_->expected());
}

bool Engine::gradients_complete(int unit) const {
  return uses_->gradients_complete(unit);
}

void Engine::end_backward() {
  enter(Phase::kAfterBackward);
  uneven_join_->announce_backward(own_->backward);
  gradients_->close_backward();
  had_backward_ = true;
  ++backwards_;
  trained_ = uses_->expected();
  uses_->end_backward();
}

void Engine::abandon(bool in_backward) {
  uses_->release_all();
  if (!in_backward) return;
  backward_failed_ = true;
  end_backward();
}

bool Engine::trains() const {
  return std::ranges::any_of(layout_.params, [](const ParamSpec& param) { return param.trainable; });
}

StepResult Engine::step() {
  ZR_CHECK(
      trains(), ErrorCode::kUsage, "step() of a model that has no trainable parameter",
      {.where = "engine.step",
       .got = std::to_string(layout_.params.size()) + " parameters, all frozen",
       .hint = "set requires_grad on what should be trained, or name it in a parameter group, before the engine is "
               "built"});
  enter(Phase::kStep);
  uneven_join_->announce(own_->step);
  uneven_join_->forget_backward();
  // Where the others wait for this rank, they hear of it from the commit vote.
  const bool votes = world() > 1 && micro_step_ + 1 == settings_.micro_steps;
  if (!had_backward_ && !votes) throw_idle(rank(), world());
  const bool idle = !std::exchange(had_backward_, false);
  if (++micro_step_ < settings_.micro_steps) {
    gradients_->set_micro_step(micro_step_);
    enter(Phase::kBetweenSteps);
    return {.step = committed_steps_, .lr = learning_rates()[reported_group_]};
  }
  micro_step_ = 0;
  StepResult result = together([&] { return finish_step(idle); });
  if (activity_) activity_->finish_step(++boundaries_);
  enter(Phase::kBetweenSteps);
  return result;
}

CommitVote Engine::cast_vote(bool idle, bool discards) {
  uses_->release_kept();
  parameters_->quiesce();
  gradients_->complete();

  StepTimes times = clock_->take(waited());
  if (boundaries_ == 0) times = {};  // building the model is no part of a step
  Ballot ballot{.groups = digest_of(settings_.groups),
                .has_grad = std::vector<bool>(layout_.params.size()),
                .offender = gradients_->offender(),
                .failed = backward_failed_,
                .idle = idle,
                .backwards = std::exchange(backwards_, 0),
                .preempted = preemption_requested(),
                .times = times,
                .joined = uneven_join_->take_joined(),
                .discards = discards,
                .trains = digest_of(trained_)};
  for (std::size_t flat = 0; flat < layout_.flats.size(); ++flat) {
    if (!gradients_->has_sums(static_cast<int>(flat))) continue;
    ballot.norm.merge(gradients_->norm(static_cast<int>(flat)));
  }
  for (std::size_t param = 0; param < layout_.params.size(); ++param) {
    ballot.has_grad[param] = gradients_->has_grad(static_cast<int>(param));
  }
  return take_commit_vote(ballot, communicator_);
}

void Engine::forget_gradients() {
  gradients_->begin_step();
  backward_failed_ = false;
}

void Engine::discard_gradients() {
  if (!had_backward_) return;
  ZR_CHECK(
      micro_step_ == 0, ErrorCode::kUsage, "zero_grad() after a backward in the middle of an accumulation",
      {.where = "engine.zero_grad",
       .expected = "a call before the first step() of an accumulation, or after its last",
       .got = std::to_string(micro_step_) + " of " + std::to_string(settings_.micro_steps) +
              " micro-steps, summed already",
       .hint =
           "gradients that another loss leaves here do not arise while these parameters have requires_grad_(False)"});
  const CommitVote vote = together([&] {
    uneven_join_->announce(own_->discard);
    return cast_vote(/*idle=*/false, /*discards=*/true);
  });
  had_backward_ = false;
  forget_gradients();
  if (vote.keeping_rank >= 0) throw_not_all_discard(vote, world());
}

StepResult Engine::finish_step(bool idle) {
  if (planted("leaked_buffer")) {
    constexpr std::size_t kLeaked = std::size_t{64} << 10U;
    Arena arena = device_.make_arena(ArenaKind::kPrivate, kLeaked, "leaked");
    auto* const leaked = new Buffer(arena.allocate(kLeaked, {-1, MemoryState::kReduced}, device_.ledger()));
    std::memset(leaked->data(), 1, leaked->size());
  }
  ZR_FAILPOINT("engine.vote");
  const CommitVote vote = cast_vote(idle, /*discards=*/false);
  if (vote.refused()) forget_gradients();
  throw_if_refused(vote, {.groups = settings_.groups, .params = layout_.params, .trains = trained_}, communicator_);

  warnings_->look_at(vote, committed_steps_, boundaries_ > 0);
  StepResult result = outcome_of(
      vote,
      {.model = layout_, .settings = settings_, .committed = committed_steps_, .reported_group = reported_group_});
  if (result.reason.empty()) {
    if (settings_.plan.gathers_gradients(world())) gradients_->share_sums();
    ZR_FAILPOINT("engine.update");
    updater_->update(vote.has_grad, mean_factor(result.batches) * result.clip_coefficient, settings_.groups,
                     settings_.schedule.factor(committed_steps_));
    ZR_FAILPOINT("engine.publish");
    parameters_->publish();
    ZR_FAILPOINT("engine.committed");
    result.committed = true;
    result.step = ++committed_steps_;
  }
  warnings_->look_at_wide_gradient(gradients_->first_wide());
  forget_gradients();
  if (!result.committed) log_.progress("step skipped on all ranks: " + result.reason);
  warnings_->count(result);
  return result;
}

void Engine::enter(Phase phase, int unit) noexcept {
  if (activity_) activity_->enter(phase, watched_as_, unit);
  clock_->turn(phase, waited());
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
  settings_.groups[static_cast<std::size_t>(group)] = hyper;
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
  gradients_->sync(what, all ? name : std::string_view());
  if (activity_) activity_->resume(before);
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

void Engine::end_uneven_join() {
  uneven_join_->end();
  parameters_->forget_order();
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
    if (out < world() && settings_.uneven == Uneven::kJoin) {
      parameters_->forget_order();
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
  uses_->release_kept();
  parameters_->quiesce();
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
      Error(ErrorCode::kAborted, "a call of all ranks was interrupted there",
            {.where = "engine", .who = "rank " + std::to_string(rank()) + "/" + std::to_string(world())}));
}

void Engine::require_not_parted() const {
  ZR_CHECK(
      !parted_, ErrorCode::kAborted, "an earlier call of all ranks was interrupted on this rank",
      {.where = "engine",
       .who = "rank " + std::to_string(rank()) + "/" + std::to_string(world()),
       .hint = "the ranks are no longer at one place, and the others have been told: end the job and start it again"});
}

MemoryReport Engine::memory_report() const {
  const ParameterStore::Counters& counters = parameters_->counters();
  const std::vector<StateDeclaration> states = optimizer_->states();
  return {.planned = plan_memory(layout_, settings_.plan, rank(), states, settings_.micro_steps),
          .measured_peak = device_.ledger().at_peak(),
          .live = device_.ledger().live(),
          .construction_peak = construction_peak_,
          .live_gathered_peak = counters.live_bytes_peak,
          .live_slots_peak = counters.live_slots_peak,
          .overflow_slots = counters.overflow_slots,
          .spills = gradients_->spills(),
          .resident = memory_->resident_bytes(),
          .transport = communicator_.backend().memory_bytes() + memory_->transport_bytes() +
                       parameters_->transport_bytes() + gradients_->transport_bytes(),
          .pss = pss_bytes()};
}

WireBytes Engine::planned_wire() const {
  return plan_wire(layout_, settings_.plan, rank(), settings_.micro_steps);
}

void Engine::reset_peaks() {
  device_.ledger().reset_peak();
  parameters_->reset_peaks();
}

}  // namespace zeroth
