#include "base/planted.h"
#include "engine/commit_vote.h"
#include "engine/phase_clock.h"
#include "engine/startup_check.h"
#include "engine/straggler.h"
#include "engine/uneven_join.h"
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

NextCall call_of(SyncPoint what) {
  switch (what) {
    case SyncPoint::kAverage:
      return NextCall::kAverage;
    case SyncPoint::kBarrier:
      return NextCall::kBarrier;
    case SyncPoint::kBuffers:
      return NextCall::kBuffers;
    case SyncPoint::kExport:
      return NextCall::kExport;
    case SyncPoint::kClose:
      return NextCall::kClose;
    case SyncPoint::kStep:
      return NextCall::kStep;
    case SyncPoint::kRound:
      break;
  }
  return NextCall::kListen;
}

}  // namespace

/// Leases on one unit, by why they are held.
struct Engine::UnitUse {
  std::vector<UnshardLease> forward;  ///< one a running forward
  UnshardLease kept;                  ///< from forward to backward
  UnshardLease backward;
  int trainable = 0;       ///< trainable parameters
  int arrived = 0;         ///< of them, with a gradient in this backward
  std::vector<bool> seen;  ///< one a parameter of the unit's spec
};

Engine::Engine(std::vector<ParamSpec> params, std::vector<UnitSpec> units, EngineSettings settings, Device& device,
               std::shared_ptr<CommBackend> backend, ParameterBinder& binder, Logger logger)
    : settings_(std::move(settings)),
      device_(device),
      communicator_(std::move(backend)),
      binder_(binder),
      log_(std::move(logger)),
      optimizer_(make_optimizer(settings_.optimizer)),
      pool_(std::make_unique<ThreadPool>(settings_.threads)),
      layout_(make_model_layout(std::move(params), std::move(units), settings_.plan.degrees(communicator_.size()))) {
  stragglers_ = std::make_unique<StragglerDetector>();
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
  expected_.resize(layout_.params.size());
  int reported = static_cast<int>(settings_.groups.size());
  for (std::size_t param = 0; param < layout_.params.size(); ++param) {
    expected_[param] = layout_.params[param].trainable;
    if (layout_.params[param].trainable) reported = std::min(reported, layout_.params[param].group);
  }
  reported_group_ =
      static_cast<std::size_t>(reported) < settings_.groups.size() ? static_cast<std::size_t>(reported) : 0;
  ZR_CHECK(std::ranges::any_of(layout_.params, [](const ParamSpec& param) { return param.trainable; }),
           ErrorCode::kModel, "the model has no trainable parameter",
           {.where = "engine",
            .got = std::to_string(layout_.params.size()) + " parameters, all frozen",
            .hint = "set requires_grad on what should be trained before the engine is built"});
  require_plan_fits(layout_, settings_, static_cast<int>(optimizer_->states().size()), communicator_);
  build_stores();
}

void Engine::build_stores() {
  CommBackend& backend = communicator_.backend();
  backend.set_tag_names(tag_names(layout_));
  const int states = static_cast<int>(optimizer_->states().size());
  const KernelContext kernels{pool_.get(), kernels::best_isa()};
  memory_ = std::make_unique<ModelMemory>(layout_, settings_.plan, states, settings_.micro_steps, device_, backend);
  parameters_ = std::make_unique<ParameterStore>(layout_, settings_.plan, *memory_, backend, device_,
                                                 device_.make_stream("gather"), kernels, binder_);
  gradients_ = std::make_unique<GradientStore>(layout_, settings_.plan, settings_.micro_steps, *memory_, backend,
                                               device_.make_stream("reduce"), kernels, device_.ledger());
  updater_ = std::make_unique<Updater>(layout_, *optimizer_, *memory_, backend, kernels);
  uneven_join_ = std::make_unique<UnevenJoin>(communicator_, layout_, [this] { gradients_->sync(SyncPoint::kRound); });
  parameters_->set_before_gather([this](int unit) { announce(NextCall::kGather, unit); });
  gradients_->set_before_reduce([this](int flat) { announce(NextCall::kReduce, flat); });
  uses_.resize(layout_.units.size());
  for (std::size_t unit = 0; unit < uses_.size(); ++unit) {
    for (const int param : layout_.units[unit].params) {
      if (layout_.params[static_cast<std::size_t>(param)].trainable) ++uses_[unit].trainable;
    }
    uses_[unit].seen.assign(layout_.units[unit].params.size(), false);
  }
}

void Engine::set_watch(std::shared_ptr<RankWatch> watch) {
  watch_ = std::move(watch);
  if (!watch_) return;
  std::vector<std::string> units;
  for (const UnitSpec& unit : layout_.units) units.push_back(unit.name);
  watched_as_ = watch_->add_model(std::move(units));
}

Engine::~Engine() {
  uses_.clear();
  communicator_.backend().set_tag_names({});  // they speak of this engine's layout
}

void Engine::initialize(const std::function<ConstTensorView(int)>& values, const std::function<void(int)>& release) {
  const int differing = take_values(values, release);
  if (differing >= 0) {
    log_.warn("initial values differed from rank 0's (first in unit " +
              layout_.units[static_cast<std::size_t>(differing)].name + "); rank 0's are used");
  }
  device_.ledger().reset_peak();
  parameters_->publish();
  if (settings_.plan.gathers_parameters()) return;
  for (std::size_t flat = 0; flat < layout_.flats.size(); ++flat) {
    binder_.bind(static_cast<int>(flat), memory_->parameters(static_cast<int>(flat)));
  }
}

int Engine::take_values(const std::function<ConstTensorView(int)>& values, const std::function<void(int)>& release) {
  int differing = -1;
  std::size_t largest = 0;
  for (const FlatLayout& layout : layout_.flats) largest = std::max(largest, layout.bytes());
  // One for all: pages are touched once, not once a flat.
  const Arena staging = device_.make_arena(ArenaKind::kPrivate, largest, "construction");
  const MemoryHold staging_hold = device_.ledger().hold({-1, MemoryState::kOther}, largest);
  construction_peak_ = largest;
  for (std::size_t unit = 0; unit < layout_.units.size(); ++unit) {
    for (const int flat : layout_.unit_flats[unit]) {
      const FlatLayout& layout = layout_.flat(flat);
      if (layout.length == 0) continue;
      const std::span<std::byte> whole(staging.data(), layout.bytes());
      const std::size_t element = size_of(layout.dtype);
      std::int64_t written = 0;
      const auto fill_until = [&](std::int64_t end) {  // padding, over what the flat before left there
        std::memset(whole.data() + static_cast<std::size_t>(written) * element, 0,
                    static_cast<std::size_t>(end - written) * element);
      };
      for (const Segment& segment : layout.segments) {
        if (segment.numel == 0) continue;  // it may have no address
        const ConstTensorView value = values(segment.param);
        fill_until(segment.offset);
        std::memcpy(whole.data() + static_cast<std::size_t>(segment.offset) * element, value.data, value.bytes());
        written = segment.offset + segment.numel;
      }
      fill_until(layout.length);
      const std::string_view text(reinterpret_cast<const char*>(whole.data()), whole.size());
      const std::uint64_t before = digest64(text);
      communicator_.broadcast(std::span(reinterpret_cast<std::uint8_t*>(whole.data()), whole.size()), 0,
                              {.unit = layout.unit});
      if (digest64(text) != before && differing < 0) differing = static_cast<int>(unit);
      store_initial(flat, whole.data());
    }
    release(static_cast<int>(unit));
  }
  return differing;
}

void Engine::store_initial(int flat, const std::byte* values) {
  const FlatLayout& layout = layout_.flat(flat);
  const std::size_t element = size_of(layout.dtype);
  const Range rest = memory_->rest_range(flat, rank());
  std::memcpy(memory_->parameters(flat), values + static_cast<std::size_t>(rest.begin) * element,
              static_cast<std::size_t>(rest.size()) * element);
}

Invocation Engine::begin_forward(int unit, bool evaluates) {
  return {unit, ++forward_seq_, micro_step_, evaluates};
}

void Engine::pre_forward(const Invocation& use) {
  enter(use.evaluates ? Phase::kEvaluation : Phase::kForward, use.unit);
  // Another way through the ring begins: what is kept for a backward yet to come gives its slot up and is gathered
  // again then.
  if (kept_in_ring_ >= 0 && kept_in_ring_ != use.unit && layout_.units[static_cast<std::size_t>(use.unit)].repeated) {
    uses_[static_cast<std::size_t>(std::exchange(kept_in_ring_, -1))].kept.reset();
  }
  uses_[static_cast<std::size_t>(use.unit)].forward.emplace_back(*parameters_, use.unit);
}

void Engine::post_forward(const Invocation& use, bool awaits_backward) {
  UnitUse& unit = uses_[static_cast<std::size_t>(use.unit)];
  ZR_CHECK(!unit.forward.empty(), ErrorCode::kUsage, "post_forward without pre_forward",
           {.where = "engine", .which = "unit " + layout_.units[static_cast<std::size_t>(use.unit)].name});
  UnshardLease lease = std::move(unit.forward.back());
  unit.forward.pop_back();
  if (!awaits_backward || unit.kept || !keeps_gathered(layout_, settings_.plan, use.unit)) return;
  unit.kept = std::move(lease);
  const bool shares_slot = settings_.plan.reshard == Reshard::kDefault && settings_.plan.gathers_parameters();
  if (shares_slot && layout_.units[static_cast<std::size_t>(use.unit)].repeated) kept_in_ring_ = use.unit;
}

void Engine::drop_forward(const Invocation& use) noexcept {
  std::vector<UnshardLease>& leases = uses_[static_cast<std::size_t>(use.unit)].forward;
  if (!leases.empty()) leases.pop_back();  // else abandon() was here first
}

void Engine::pre_backward(int unit) {
  announce_backward();
  enter(Phase::kBackward, unit);
  UnitUse& use = uses_[static_cast<std::size_t>(unit)];
  if (!use.backward) use.backward = UnshardLease(*parameters_, unit);
}

void Engine::post_backward(int unit) {
  UnitUse& use = uses_[static_cast<std::size_t>(unit)];
  use.kept.reset();
  use.backward.reset();
}

std::size_t Engine::position_in_unit(int param) const {
  const std::vector<int>& params =
      layout_.units[static_cast<std::size_t>(layout_.places[static_cast<std::size_t>(param)].unit)].params;
  return static_cast<std::size_t>(std::ranges::find(params, param) - params.begin());
}

void Engine::grad_ready(int param, ConstTensorView grad) {
  const int unit = layout_.places[static_cast<std::size_t>(param)].unit;
  UnitUse& use = uses_[static_cast<std::size_t>(unit)];
  announce_backward();
  gradients_->add(param, grad);
  const std::size_t position = position_in_unit(param);
  if (!use.seen[position]) {
    use.seen[position] = true;
    ++use.arrived;
  }
  if (use.arrived == use.trainable) gradients_->close_unit(unit);
}

void Engine::expect_gradient(int param, bool expected) {
  const auto index = static_cast<std::size_t>(param);
  if (!layout_.params[index].trainable || expected_[index] == expected) return;
  expected_[index] = expected;
  uses_[static_cast<std::size_t>(layout_.places[index].unit)].trainable += expected ? 1 : -1;
}

void Engine::end_gradients(int unit) {
  if (!gradients_complete(unit)) gradients_->end_unit(unit, expected_);
}

bool Engine::completes_unit(int param) const {
  const int unit = layout_.places[static_cast<std::size_t>(param)].unit;
  const UnitUse& use = uses_[static_cast<std::size_t>(unit)];
  return use.arrived + 1 == use.trainable && !use.seen[position_in_unit(param)];
}

bool Engine::gradients_complete(int unit) const {
  const UnitUse& use = uses_[static_cast<std::size_t>(unit)];
  return use.arrived == use.trainable;
}

void Engine::end_backward() {
  enter(Phase::kAfterBackward);
  announce_backward();
  gradients_->close_backward();
  had_backward_ = true;
  ++backwards_;
  for (UnitUse& use : uses_) {
    use.kept.reset();
    use.backward.reset();
    use.arrived = 0;
    use.seen.assign(use.seen.size(), false);
  }
}

void Engine::abandon(bool in_backward) {
  release_leases();
  if (!in_backward) return;
  backward_failed_ = true;
  end_backward();
}

void Engine::release_leases() {
  for (UnitUse& use : uses_) {
    use.forward.clear();
    use.kept.reset();
    use.backward.reset();
  }
}

StepResult Engine::step() {
  enter(Phase::kStep);
  announce(NextCall::kStep);
  backward_announced_ = false;
  // Where the others wait for this rank, they hear of it from the commit vote.
  const bool votes = world() > 1 && micro_step_ + 1 == settings_.micro_steps;
  if (!had_backward_ && !votes) throw_idle(rank());
  const bool idle = !std::exchange(had_backward_, false);
  if (++micro_step_ < settings_.micro_steps) {
    gradients_->set_micro_step(micro_step_);
    enter(Phase::kBetweenSteps);
    return {.step = committed_steps_, .lr = learning_rates()[reported_group_]};
  }
  micro_step_ = 0;
  StepResult result = together([&] { return finish_step(idle); });
  if (watch_) watch_->finish_step(++boundaries_);
  enter(Phase::kBetweenSteps);
  return result;
}

void Engine::throw_idle(int idle_rank) const {
  throw Error(ErrorCode::kUsage, "step() without a backward since the last step()",
              {.where = "engine.step",
               .who = "rank " + std::to_string(idle_rank) + "/" + std::to_string(world()),
               .hint = "call backward(loss) on every rank in every micro-step; nothing was changed"});
}

CommitVote Engine::cast_vote(bool idle, bool discards) {
  for (UnitUse& use : uses_) use.kept.reset();
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
                .joined = std::exchange(joined_, 0),
                .discards = discards};
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
    announce(NextCall::kDiscard);
    return cast_vote(/*idle=*/false, /*discards=*/true);
  });
  had_backward_ = false;
  forget_gradients();
  if (vote.keeping_rank >= 0) throw_not_all_discard(vote);
}

void Engine::throw_not_all_discard(const CommitVote& vote) const {
  const std::string of = "/" + std::to_string(world());
  throw Error(ErrorCode::kMismatch, "some ranks discard their gradients, others call step()",
              {.where = "engine.vote",
               .who = "rank " + std::to_string(vote.discarding_rank) + of,
               .expected = "step() on all ranks, or zero_grad() on all",
               .got = "zero_grad() on rank " + std::to_string(vote.discarding_rank) + of + ", step() on rank " +
                      std::to_string(vote.keeping_rank) + of,
               .hint = "whether a batch is thrown away has to be decided alike on all ranks; nothing was updated"});
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
  if (vote.discarding_rank >= 0) {
    forget_gradients();
    throw_not_all_discard(vote);
  }
  if (vote.idle_rank >= 0) {
    forget_gradients();
    throw_idle(vote.idle_rank);
  }
  if (vote.other_groups_rank >= 0) {
    forget_gradients();
    throw_other_groups(settings_.groups, vote.usual_groups_rank, vote.other_groups_rank, communicator_);
  }

  look_at_others(vote);
  const std::int64_t batches = std::int64_t{world()} * settings_.micro_steps - vote.joined;
  const double average = 1.0 / static_cast<double>(batches);
  const double lr_factor = settings_.schedule.factor(committed_steps_);
  StepResult result{.boundary = true, .step = committed_steps_, .batches = batches};
  result.preempted = vote.preempted_rank >= 0;
  result.times = vote.times;
  result.grad_norm = vote.norm.l2_norm() * average;
  result.lr = settings_.groups[reported_group_].lr * lr_factor;
  if (vote.offender_rank >= 0) {
    result.first_offender = FirstOffender{layout_.params[static_cast<std::size_t>(vote.offender.param)].name,
                                          vote.offender_rank, vote.offender.micro_step, vote.offender.count};
  }
  const bool finite = vote.offender_rank < 0 && vote.norm.nonfinite_blocks() == 0;
  if (vote.failed_rank >= 0) {
    result.reason = "backward failed on rank " + std::to_string(vote.failed_rank);
  } else if (!finite) {
    result.reason = result.first_offender ? "non-finite gradient: parameter " + result.first_offender->param +
                                                ", rank " + std::to_string(result.first_offender->rank) +
                                                ", micro-step " + std::to_string(result.first_offender->micro_step) +
                                                ", " + std::to_string(result.first_offender->count) + " elements"
                                          : "the sum of gradients over ranks is not finite though each of them is";
  } else {
    if (settings_.gradient_clipping > 0) {
      result.clip_coefficient = std::min(1.0, settings_.gradient_clipping / (result.grad_norm + 1e-6));
    }
    if (settings_.plan.gathers_gradients(world())) gradients_->share_sums();
    ZR_FAILPOINT("engine.update");
    updater_->update(vote.has_grad, average * result.clip_coefficient, settings_.groups, lr_factor);
    ZR_FAILPOINT("engine.publish");
    parameters_->publish();
    ZR_FAILPOINT("engine.committed");
    result.committed = true;
    result.step = ++committed_steps_;
  }
  warn_of_wide_gradient();
  forget_gradients();
  nonfinite_in_a_row_ = finite ? 0 : nonfinite_in_a_row_ + 1;
  if (!result.committed) log_.progress("step skipped on all ranks: " + result.reason);
  ZR_CHECK(nonfinite_in_a_row_ < settings_.max_nonfinite_steps, ErrorCode::kNonFinite,
           std::to_string(nonfinite_in_a_row_) + " steps in a row had no finite gradient",
           {.where = "engine.step",
            .which = result.first_offender ? result.first_offender->param : "",
            .got = result.reason,
            .hint = "lower the learning rate, clip gradients, or look at the named parameter's inputs"});
  return result;
}

void Engine::enter(Phase phase, int unit) noexcept {
  if (watch_) watch_->enter(phase, watched_as_, unit);
  clock_->turn(phase, waited());
}

void Engine::look_at_others(const CommitVote& vote) {
  if (vote.joined > 0) return;  // who has no batch does less
  if (vote.uneven_rank >= 0 && vote.failed_rank < 0 && !std::exchange(warned_of_uneven_, true) && rank() == 0) {
    const auto uneven = static_cast<std::size_t>(vote.uneven_rank);
    log_.warn("rank " + std::to_string(uneven) + " ran " + std::to_string(vote.backwards[uneven]) +
              " backwards in step " + std::to_string(committed_steps_ + 1) + ", rank 0 ran " +
              std::to_string(vote.backwards[0]) +
              ": where a rank leaves out its step(), the next one takes the gradients of two batches from it");
  }
  if (boundaries_ == 0 || rank() != 0) return;  // who is slow is the same for all, and one says it
  if (const std::optional<Straggler> slow = stragglers_->observe(vote.times)) log_.warn(describe(*slow));
}

void Engine::warn_of_wide_gradient() {
  const int param = gradients_->first_wide();
  if (param < 0 || std::exchange(warned_of_wide_gradient_, true)) return;
  const ParamPlace& place = layout_.places[static_cast<std::size_t>(param)];
  log_.warn(
      "the gradient of " + layout_.params[static_cast<std::size_t>(param)].name +
      " came wider than its bucket, which takes " + format_bytes(layout_.flat(place.flat).accumulation_bytes()) +
      " beyond the plan from now on: it is used several times, or a graph of an earlier step still holds it (keep "
      "loss.item() "
      "instead of loss), or it came in float32. With zeroth.narrow_buckets = false such buckets are part of the plan");
}

void Engine::set_group(int group, const GroupHyper& hyper) {
  ZR_CHECK(group >= 0 && static_cast<std::size_t>(group) < settings_.groups.size(), ErrorCode::kUsage,
           "there is no such parameter group",
           {.where = "engine.set_group",
            .expected = "0 to " + std::to_string(settings_.groups.size() - 1),
            .got = std::to_string(group)});
  settings_.groups[static_cast<std::size_t>(group)] = hyper;
}

std::vector<double> Engine::learning_rates() const {
  const double factor = settings_.schedule.factor(committed_steps_);
  std::vector<double> rates;
  for (const GroupHyper& group : settings_.groups) rates.push_back(group.lr * factor);
  return rates;
}

void Engine::sync(SyncPoint what, std::string_view name) {
  const std::uint64_t before = watch_ ? watch_->entered() : 0;
  enter(Phase::kSyncPoint);
  // The names of those that have a batch are in what they announce.
  const bool all = uneven_join_->num_out() == 0;
  announce(call_of(what), name.empty() ? -1 : static_cast<int>(digest64(name) >> 33U));
  gradients_->sync(what, all ? name : std::string_view());
  if (watch_) watch_->resume(before);
}

// One-sided sync points know what kind of call it is, and no more: names are compared by a matched one.
void Engine::compare_names(SyncPoint what, std::string_view name) {
  if (world() > 1 && communicator_.backend().capabilities().one_sided) communicator_.barrier(name, tag_of(what));
}

double Engine::sum_over_ranks(double value, std::string_view name) {
  together([&] {
    sync(SyncPoint::kAverage, name);
    if (!name.empty() && uneven_join_->num_out() == 0) compare_names(SyncPoint::kAverage, name);
    communicator_.all_reduce(std::span(&value, 1));
  });
  return value;
}

double Engine::average(double value, std::string_view name) {
  return sum_over_ranks(value, name) / static_cast<double>(world() - uneven_join_->num_out());
}

void Engine::barrier(std::string_view name) {
  together([&] {
    sync(SyncPoint::kBarrier, name);
    compare_names(SyncPoint::kBarrier, uneven_join_->num_out() == 0 ? name : std::string_view());
  });
}

void Engine::announce(NextCall call, int what) {
  if (uneven_join_->num_out() == 0 || uneven_join_->is_out()) return;
  uneven_join_->announce({.call = call, .what = what});
  require_joinable(call);
}

void Engine::announce_backward() {
  if (!std::exchange(backward_announced_, true)) announce(NextCall::kBackward);
}

void Engine::require_joinable(NextCall call) const {
  if (call != NextCall::kExport && call != NextCall::kClose) return;
  throw Error(
      ErrorCode::kUsage, "a call of all ranks while some have no batch and wait for the others",
      {.where = "engine.next_batch",
       .who = "rank " + std::to_string(rank()) + "/" + std::to_string(world()),
       .which = call == NextCall::kExport ? "an export" : "close()",
       .expected =
           "forward, backward, step(), zero_grad(), average() or barrier() until the batches of all ranks are used up",
       .got = ranks_text(uneven_join_->out()) + " without a batch",
       .hint = "make it after the loop over the batches"});
}

void Engine::begin_epoch() {
  if (world() == 1) return;
  backward_announced_ = false;
  if (uneven_join_->num_out() == 0) return;
  together([&] { announce(NextCall::kEpoch); });
  end_uneven_join();
}

void Engine::end_uneven_join() {
  uneven_join_->end();
  parameters_->forget_order();
}

bool Engine::next_batch(bool has_batch, const JoinedCalls& calls) {
  Next next = begin_batch(has_batch);
  for (; next == Next::kStep || next == Next::kShareBuffers; next = join()) {
    if (next == Next::kStep) {
      calls.step ? calls.step() : static_cast<void>(step());
    } else {
      ZR_CHECK(static_cast<bool>(calls.share_buffers), ErrorCode::kInternal,
               "nobody shares buffers on a rank without a batch", {.where = "engine.next_batch"});
      calls.share_buffers();
    }
  }
  return next == Next::kBatch;
}

Next Engine::begin_batch(bool has_batch) {
  if (world() == 1) return has_batch ? Next::kBatch : Next::kEnd;
  return together([&] {
    backward_announced_ = false;
    uneven_join_->begin_batch(has_batch);
    const int out = uneven_join_->num_out();
    if (out == 0) return Next::kBatch;
    if (out < world() && settings_.uneven == Uneven::kJoin) {
      parameters_->forget_order();
      return has_batch ? Next::kBatch : follow();
    }
    const std::vector<int> without = uneven_join_->out();
    end_uneven_join();
    if (out < world() && settings_.uneven == Uneven::kError) throw_uneven(without);
    return Next::kEnd;
  });
}

Next Engine::join() {
  return together([&] { return follow(); });
}

void Engine::throw_uneven(const std::vector<int>& out) const {
  std::vector<int> others;
  for (int rank = 0; rank < world(); ++rank) {
    if (std::ranges::find(out, rank) == out.end()) others.push_back(rank);
  }
  throw Error(ErrorCode::kMismatch,
              ranks_text(out) + (out.size() == 1 ? " has" : " have") + " no batch left, " + ranks_text(others) +
                  (others.size() == 1 ? " has" : " have") + " more",
              {.where = "engine.next_batch",
               .who = "rank " + std::to_string(rank()) + "/" + std::to_string(world()),
               .which = "the batch after step " + std::to_string(committed_steps_),
               .expected = "as many batches on every rank",
               .hint = "zeroth.uneven = \"join\" trains on all of them (ranks without one take part with weight zero), "
                       "\"drop\" ends with the first"});
}

Next Engine::follow() {
  enter(Phase::kSyncPoint);
  for (UnitUse& use : uses_) use.kept.reset();
  parameters_->quiesce();
  while (true) {
    const Announcement next = uneven_join_->listen();
    switch (next.call) {
      case NextCall::kNoBatch:
      case NextCall::kEpoch:
        end_uneven_join();
        enter(Phase::kBetweenSteps);
        return Next::kEnd;
      case NextCall::kStep:
        if (!gradients_->reads_peers()) gradients_->close_backward();
        ++joined_;
        had_backward_ = true;
        return Next::kStep;
      case NextCall::kBuffers:
        return Next::kShareBuffers;
      default:
        take_part(next.call, next.what);
    }
  }
}

void Engine::take_part(NextCall call, int what) {
  switch (call) {
    case NextCall::kBatch:
      return parameters_->forget_order();
    case NextCall::kGather:
      return parameters_->take_part(what);
    case NextCall::kReduce:
      return gradients_->take_part(what);
    case NextCall::kBackward:
      // One-sided: nobody has to wait for gradients of this rank. Else its part in each reduction is yet to come.
      if (gradients_->reads_peers()) gradients_->close_backward();
      return;
    case NextCall::kDiscard:
      had_backward_ = true;
      return discard_gradients();
    case NextCall::kAverage:
      (void)sum_over_ranks(0.0);
      return;
    case NextCall::kBarrier:
      return barrier();
    default:
      return require_joinable(call);
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
  const int states = static_cast<int>(optimizer_->states().size());
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
