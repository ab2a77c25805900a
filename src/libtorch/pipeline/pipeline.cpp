#include "libtorch/pipeline/chunk_graph.h"
#include "libtorch/pipeline/kept_forward.h"
#include "libtorch/pipeline/part_scope.h"
#include "libtorch/pipeline/running_action.h"
#include "libtorch/pipeline/same_program.h"
#include "libtorch/pipeline/shared_head.h"
#include "libtorch/pipeline/stage_links.h"
#include "libtorch/pipeline/unit_gathers.h"
#include "libtorch/runtime.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/libtorch/pipeline.h>
#include <zeroth/program/passes.h>
#include <zeroth/program/verify.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <typeinfo>
#include <utility>

namespace zeroth::libtorch {
namespace {

constexpr const char* kWhere = "libtorch.pipeline";

using Key = std::pair<int, int>;            // chunk, micro-batch of the program
using Held = std::pair<int, std::int64_t>;  // chunk, micro-batch: numbered through all steps where gradients are late

Key key_of(const Action& action) {
  return {action.chunk, action.micro_batch};
}

/// Every chunk's forward of each micro-batch, one micro-batch after the other.
StepProgram forwards_of(const StepProgram& trained, int micro_batches) {
  StepProgram program{
      .schedule = trained.schedule, .micro_batches = micro_batches, .rank_of_chunk = trained.rank_of_chunk};
  program.actions.resize(trained.actions.size());
  for (int micro_batch = 0; micro_batch < micro_batches; ++micro_batch) {
    for (int chunk = 0; chunk < trained.chunks(); ++chunk) {
      program.actions[static_cast<std::size_t>(trained.rank_of_chunk[static_cast<std::size_t>(chunk)])].push_back(
          {ActionKind::kForward, chunk, micro_batch});
    }
  }
  program = add_messages(std::move(program));
  verify(program, {.forwards_only = true});
  if (trained.shares_head()) add_scores(program);
  return program;
}

/// A backward that reads no parameters, if `without`.
class WithoutParameters {
 public:
  WithoutParameters(Runtime& runtime, bool without) : runtime_(runtime) { runtime_.set_reads_parameters(!without); }
  WithoutParameters(const WithoutParameters&) = delete;
  WithoutParameters& operator=(const WithoutParameters&) = delete;
  ~WithoutParameters() { runtime_.set_reads_parameters(true); }

 private:
  Runtime& runtime_;
};

/// What Pipeline::Impl::run() knows.
bool runs(const Action& action) {
  if (is_vocabulary(action.kind)) return true;
  switch (action.kind) {
    case ActionKind::kForward:
    case ActionKind::kBackward:
    case ActionKind::kBackwardInput:
    case ActionKind::kBackwardWeight:
    case ActionKind::kSendForward:
    case ActionKind::kRecvForward:
    case ActionKind::kSendBackward:
    case ActionKind::kRecvBackward:
    case ActionKind::kUnshard:
    case ActionKind::kReshard:
    case ActionKind::kReduce:
    case ActionKind::kRecompute:
    case ActionKind::kStep:
      return true;
    case ActionKind::kFlush:
    case ActionKind::kFetch:
      return action.micro_batch >= 0;  // those of states are not run
    default:
      return false;
  }
}

/// A chunk whose weights have changed since its forward has no graph of it.
void require_recomputed(const StepProgram& program) {
  for (const std::vector<Action>& list : program.actions) {
    for (const Action& action : list) {
      if (action.kind != ActionKind::kBackward && action.kind != ActionKind::kBackwardInput) continue;
      const Action again{ActionKind::kRecompute, action.chunk, action.micro_batch};
      ZR_CHECK(program.lateness(action) == 0 || std::ranges::find(list, again) != list.end(), ErrorCode::kUsage,
               "a backward is late, and its forward is not computed again",
               {.where = kWhere,
                .which = to_text(action) + " of " + program.schedule,
                .expected = to_text(again) + " before it",
                .hint = "parameters have changed since, so that graphs of then are no more"});
    }
  }
}

bool is_last_of_backward(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kBackwardWeight;
}

}  // namespace

void require_runnable(const StepProgram& program, int stages, int micro_batches) {
  verify(program);
  ZR_CHECK(program.ranks() == stages, ErrorCode::kUsage, "the program is for another number of stages",
           {.where = kWhere,
            .which = program.schedule,
            .expected = std::to_string(stages),
            .got = std::to_string(program.ranks())});
  ZR_CHECK(program.micro_batches == micro_batches, ErrorCode::kUsage,
           "the program has another number of micro-batches than the engine has micro-steps",
           {.where = kWhere,
            .which = program.schedule,
            .expected = "gradient_accumulation_steps, " + std::to_string(micro_batches),
            .got = std::to_string(program.micro_batches)});
  for (const std::vector<Action>& list : program.actions) {
    const auto other = std::ranges::find_if_not(list, runs);
    ZR_CHECK(
        other == list.end() && program.inexact != program.late.empty(), ErrorCode::kUsage,
        "the program can be read and simulated, and not run yet",
        {.where = kWhere,
         .which = other == list.end() ? program.schedule + ", which is inexact" : to_text(*other),
         .expected = "F, B, I, W, messages, RECOMPUTE, FLUSH and FETCH of micro-batches, UNSHARD, RESHARD, REDUCE, "
                     "V_INPUT, V_S, V_SUM, V_T, V_GRAD, STEP"});
    // What is verified has it on every rank or on none, at the end.
    ZR_CHECK(!list.empty() && list.back().kind == ActionKind::kStep, ErrorCode::kUsage,
             "the program does not update the parameters",
             {.where = kWhere, .which = program.schedule, .expected = "STEP as the last action of every stage"});
    ZR_CHECK(std::ranges::count(list, ActionKind::kStep, &Action::kind) == 1, ErrorCode::kUsage,
             "the program updates the parameters more than once",
             {.where = kWhere, .which = program.schedule, .expected = "one STEP"});
  }
  require_recomputed(program);
}

class Pipeline::Impl {
 public:
  Impl(EngineBase& engine, Communicator stages, PipelineOptions options)
      : runtime_(engine.runtime()),
        activity_(runtime_->core().activity()),
        stages_(std::move(stages)),
        options_(std::move(options)),
        links_(stages_, options_.copies, engine.device()) {
    require_runnable(options_.program, stages_.size(), runtime_->core().settings().micro_steps);
    require_fits();
    const ShardingPlan& plan = runtime_->core().settings().plan;
    keeps_parameters_ = plan.reshard == Reshard::kStep;
    if (plan.gathers_parameters() && !keeps_parameters_) require_short_spans(options_.program);
    require_same_program(options_.program, stages_);
    if (activity_) activity_->set_action_reader(&text_of);
    digest_ = digest64(to_text(options_.program));
    runtime_->set_buffer_owners(options_.buffer_owners);
    if (options_.head) head_.emplace(runtime_, links_, *options_.head, options_.program, stages_.rank());
    runtime_->core().steer(gathers_of_units(actions(), options_, runtime_->core()));
    find_last_backwards();
    for (const Action& action : actions())
      if (action.kind == ActionKind::kRecompute) recomputed_.insert(key_of(action));
    require_places();
    loads_ = runtime_->loads();
    if (is_late()) require_late_fits();
    if (is_late() && runtime_->core().rank() == 0) tell_of_late();
  }

  void begin() {
    ZR_CHECK(!running_, ErrorCode::kUsage, "a step of the pipeline is under way",
             {.where = kWhere, .hint = "end() it"});
    // The messages of the rest of that step are lost, or still come.
    ZR_CHECK(
        failed_.empty(), ErrorCode::kUsage, "an earlier step of the pipeline was left before its end",
        {.where = kWhere,
         .who = own_name(),
         .which = failed_,
         .expected = "all actions of a step",
         .hint = "make another engine, and go on from a checkpoint: the other stages have run another part of it"});
    if (is_late() && std::exchange(loads_, runtime_->loads()) != runtime_->loads()) begin_anew("a load");
    running_ = true;
    ran_backward_ = false;
    links_.begin_step(++step_, digest_, {.micro_batches = options_.program.micro_batches});
    result_.reset();
    losses_ = 0.0;
    if (head_) head_->begin(at::GradMode::is_enabled());
  }

  void run(const Action& action) {
    ++report_.actions;
    const RunningAction running{
        .action = action, .stage = stages_.rank(), .stages = stages_.size(), .trains = !evaluates_};
    const ActionWord word = word_of(running);
    if (activity_) activity_->enter_action(word, phase_of(running));
    try {
      execute(action);
    } catch (const Error& error) {
      fail_in(word);
      // What two stages see of each other's programs no other rank sees.
      if (activity_ && error.code() == ErrorCode::kMismatch && typeid(error) == typeid(Error)) activity_->tell(error);
      throw;
    } catch (...) {
      fail_in(word);
      throw;
    }
  }

  [[nodiscard]] const std::string& failed_action() const { return failed_; }

  void execute(const Action& action) {
    if (!is_due(action)) return;
    if (is_vocabulary(action.kind)) return head_->run(action, part_of(action));
    switch (action.kind) {
      case ActionKind::kForward:
        return forward(action);
      case ActionKind::kRecompute:
        return recompute(action);
      case ActionKind::kFlush:
      case ActionKind::kFetch:
        return move(action);
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
      case ActionKind::kBackwardWeight:
        return backward(action);
      case ActionKind::kSendForward:
        return send(action, stage_of(action.chunk + 1), {.chunk = action.chunk + 1, .micro_batch = action.micro_batch});
      case ActionKind::kSendBackward:
        return send(action, stage_of(action.chunk - 1),
                    {.is_gradient = true, .chunk = action.chunk - 1, .micro_batch = action.micro_batch});
      case ActionKind::kRecvForward:
        return receive(action, stage_of(action.chunk - 1), {.chunk = action.chunk, .micro_batch = action.micro_batch});
      case ActionKind::kRecvBackward:
        return receive(action, stage_of(action.chunk + 1),
                       {.is_gradient = true, .chunk = action.chunk, .micro_batch = action.micro_batch});
      case ActionKind::kUnshard:  // else the layers gather their units, one after the other
        if (!keeps_parameters_) return;
        for (const int unit : units_of(action.chunk)) runtime_->core().keep_gathered(unit);
        return;
      case ActionKind::kReshard:
        for (const int unit : units_of(action.chunk)) {
          if (keeps_parameters_) runtime_->core().give_back(unit);
          ZR_ASSERT(keeps_parameters_ || !runtime_->core().holds(unit), "layers have given back what they gathered");
        }
        return;
      case ActionKind::kStep:
        links_.settle();
        if (is_late() && !ran_backward_) take_no_part();
        result_ = runtime_->step_all();
        return;
      case ActionKind::kReduce:
        return;  // begun by the last backward of the chunk
      default:
        break;
    }
    throw Error(ErrorCode::kUsage, "the executor has no such action", {.where = kWhere, .which = to_text(action)});
  }

  Result end() {
    links_.settle();
    leave();
    if (is_late()) age();
    return {.step = result_.value_or(StepResult{}), .loss = mean_loss(options_.program.micro_batches)};
  }

  double evaluate(int micro_batches) {
    if (micro_batches == 0) micro_batches = options_.program.micro_batches;
    ZR_CHECK(micro_batches > 0, ErrorCode::kUsage, "an evaluation without micro-batches",
             {.where = kWhere, .got = std::to_string(micro_batches)});
    const StepProgram program = forwards_of(options_.program, micro_batches);
    const at::NoGradGuard no_grad;
    begin();
    links_.begin_step(step_, digest64(to_text(program)), {.trains = false, .micro_batches = micro_batches});
    evaluates_ = true;
    guarded([&] {
      for (const Action& action : program.actions[static_cast<std::size_t>(stages_.rank())]) run(action);
      if (head_) head_->finish_scores();
      links_.settle();
    });
    leave();
    return mean_loss(micro_batches);
  }

  at::Tensor logits(const at::Tensor& input) {
    ZR_CHECK(head_.has_value(), ErrorCode::kUsage, "the stages share no head", {.where = kWhere});
    ZR_CHECK(!running_ && failed_.empty(), ErrorCode::kUsage, "a step of the pipeline is under way, or was left",
             {.where = kWhere, .who = own_name(), .hint = "ask for logits between two steps"});
    const bool is_root = stage_of(options_.program.chunks() - 1) == stages_.rank();
    ZR_CHECK(!is_root || (input.defined() && input.dim() > 0), ErrorCode::kUsage,
             "the stage of the last chunk gives no input of the head", {.where = kWhere, .who = own_name()});
    return head_->logits(input, stages_);
  }

  Result train() {
    begin();
    guarded([&] {
      for (const Action& action : actions()) run(action);
    });
    return end();
  }

  [[nodiscard]] const StepProgram& program() const { return options_.program; }
  [[nodiscard]] const std::vector<Action>& actions() const {
    return options_.program.actions[static_cast<std::size_t>(stages_.rank())];
  }
  [[nodiscard]] int stage() const { return stages_.rank(); }
  [[nodiscard]] PipelineReport report() const {
    PipelineReport report = report_;
    report.sent_bytes = links_.sent_bytes();
    report.received_bytes = links_.received_bytes();
    report.descriptions = links_.descriptions();
    return report;
  }
  void reset_report() {
    report_ = {};
    links_.reset_counters();
  }

 private:
  struct InFlight {
    std::vector<at::Tensor> inputs;
    ChunkGraph graph;
    GradientUses uses;             ///< of the graph
    std::vector<at::Tensor> loss;  ///< of the last chunk: as its gradient begins
  };

  /// "rank 3/4, stage 1 of 2".
  [[nodiscard]] std::string own_name() const {
    const std::string stage = "stage " + std::to_string(stages_.rank()) + " of " + std::to_string(stages_.size());
    if (!activity_) return stage;
    return "rank " + std::to_string(activity_->rank()) + "/" + std::to_string(activity_->size()) + ", " + stage;
  }
  void fail_in(ActionWord word) {
    if (activity_) activity_->fail_action();
    const ActionText text = text_of(word);
    failed_ = activity_ ? activity_->failed_action() : "action " + text.name + " (" + text.about + ")";
  }
  void leave() noexcept {
    running_ = evaluates_ = false;
    if (activity_) activity_->leave_action(Phase::kBetweenSteps);
  }

  void require_fits() const {
    const StepProgram& program = options_.program;
    const auto fits = [&](const std::vector<std::vector<int>>& lists) {
      return lists.size() == static_cast<std::size_t>(program.chunks());
    };
    ZR_CHECK(fits(options_.units) && (options_.tables.empty() || fits(options_.tables)), ErrorCode::kUsage,
             "the chunks of the program are not those of the model",
             {.where = kWhere,
              .which = program.schedule,
              .expected = std::to_string(program.chunks()),
              .got = std::to_string(options_.units.size()) +
                     (options_.tables.empty() ? "" : ", with tables of " + std::to_string(options_.tables.size()))});
    ZR_CHECK(static_cast<bool>(options_.forward), ErrorCode::kUsage, "a pipeline without a forward", {.where = kWhere});
    ZR_CHECK(program.shares_head() == options_.head.has_value(), ErrorCode::kUsage,
             "the program and the model do not share the head alike",
             {.where = kWhere,
              .which = program.schedule,
              .expected = options_.head ? "V_ actions" : "no V_ actions",
              .got = options_.head ? "none" : "some"});
  }

  void require_places() const {
    for (const Action& action : actions()) {
      if (action.kind != ActionKind::kFlush) continue;
      const bool recomputes = recomputed_.contains(key_of(action));
      ZR_CHECK(recomputes ? options_.saved != nullptr : static_cast<bool>(options_.move), ErrorCode::kUsage,
               "a program moves what is kept for a backward, and there is no place for it",
               {.where = kWhere,
                .which = to_text(action),
                .expected = recomputes ? "zeroth.activations.device"
                                       : "a RECOMPUTE of the same: what autograd saves moves in Python alone"});
    }
  }

  /// The units whose gradients an action's backward computes.
  [[nodiscard]] std::vector<int> computed_by(const Action& action) const {
    if (is_last_of_backward(action.kind)) return units_of(action.chunk);
    if (action.kind == ActionKind::kVocabGradients) return {options_.head->unit};
    return {};
  }

  /// A unit's gradients of a micro-batch are complete in the last backward that computes some, and those of the step in
  /// the last one of all. That is one of the lowest of its chunks, or V_T.
  void find_last_backwards() {
    std::map<std::pair<int, int>, std::size_t> completed;  // by unit and micro-batch
    std::map<int, std::size_t> last;                       // by unit
    for (std::size_t at = 0; at < actions().size(); ++at) {
      const Action& action = actions()[at];
      for (const int unit : computed_by(action)) completed[{unit, action.micro_batch}] = last[unit] = at;
    }
    for (const auto& [of, at] : completed) completed_in_[key_of(actions()[at])].push_back(of.first);
    for (const auto& [unit, at] : last) last_backwards_[key_of(actions()[at])].push_back(unit);
  }

  [[nodiscard]] zeroth::Engine::BackwardPart part_of(const Action& action) const {
    zeroth::Engine::BackwardPart part{.micro_step = action.micro_batch};
    const bool brings = is_last_of_backward(action.kind) || action.kind == ActionKind::kVocabGradients;
    if (!brings) return part;  // I brings the engine nothing
    if (const auto found = completed_in_.find(key_of(action)); found != completed_in_.end()) part.units = found->second;
    if (const auto found = last_backwards_.find(key_of(action)); found != last_backwards_.end())
      part.last = found->second;
    return part;
  }

  [[nodiscard]] int stage_of(int chunk) const {
    return options_.program.rank_of_chunk.at(static_cast<std::size_t>(chunk));
  }
  [[nodiscard]] bool is_last(int chunk) const { return chunk + 1 == options_.program.chunks(); }
  [[nodiscard]] const std::vector<int>& units_of(int chunk) const {
    return options_.units[static_cast<std::size_t>(chunk)];
  }

  void forward(const Action& action) {
    SentValues given;
    if (action.chunk > 0) given = take(values_, held_key(action));
    const bool trains = at::GradMode::is_enabled() && !evaluates_;
    if (!trains || !recomputed_.contains(key_of(action))) {
      Ran ran = run_chunk(action, std::move(given), options_.forward);
      pass_on(action, std::move(ran.outputs));
      if (at::GradMode::is_enabled()) hold(action, std::move(ran.flight));
      return;
    }
    const Buffers buffers = buffers_of(action.chunk);
    KeptForward kept(std::move(given), buffers, runtime_->device());
    pass_on(
        action,
        run_chunk(action, kept.inputs(), options_.forward_alone ? options_.forward_alone : options_.forward).outputs);
    kept.ran(buffers);
    kept_bytes_ += kept.bytes();
    report_.kept_peak_bytes = std::max(report_.kept_peak_bytes, kept_bytes_);
    kept_.insert_or_assign(held_key(action), std::move(kept));
  }

  void recompute(const Action& action) {
    const KeptForward kept = std::move(kept_.extract(held_key(action)).mapped());
    kept_bytes_ -= kept.bytes();
    kept.again(buffers_of(action.chunk),
               [&] { hold(action, run_chunk(action, kept.inputs(), options_.forward).flight); });
    ++report_.recomputed;
  }

  void move(const Action& action) {
    const auto found = kept_.find(held_key(action));
    if (found == kept_.end()) return options_.move(action);
    KeptForward& kept = found->second;
    kept_bytes_ -= kept.bytes();
    if (action.kind == ActionKind::kFlush) {
      kept.flush(*options_.saved);
    } else {
      kept.fetch();
    }
    kept_bytes_ += kept.bytes();
    report_.kept_peak_bytes = std::max(report_.kept_peak_bytes, kept_bytes_);
  }

  [[nodiscard]] bool is_late() const { return !options_.program.late.empty(); }

  /// Steps since the first one that counts; negative for an action whose micro-batch was in none of them.
  [[nodiscard]] std::int64_t step_of(const Action& action) const {
    return late_steps_ - options_.program.lateness(action);
  }
  /// What is late is not there in the first steps.
  [[nodiscard]] bool is_due(const Action& action) const { return !is_late() || step_of(action) >= 0; }

  [[nodiscard]] Held held_key(const Action& action) const {
    if (!is_late()) return {action.chunk, action.micro_batch};
    return {action.chunk, step_of(action) * options_.program.micro_batches + action.micro_batch};
  }

  void require_late_fits() const {
    ZR_CHECK(!runtime_->core().settings().update.delayed_after, ErrorCode::kConfig,
             "updates are delayed, and gradients are late already",
             {.where = kWhere,
              .which = "/zeroth/update/delayed_after with schedule " + options_.program.schedule,
              .expected = "one of the two",
              .hint = "leave delayed_after out"});
    const std::string rule = runtime_->config().optimizer.rule();
    ZR_CHECK(!rule.starts_with("OneBit") && rule != "ZeroOneAdam", ErrorCode::kConfig,
             "ranks exchange messages in the place of gradients, and those of late stages are not there at first",
             {.where = kWhere,
              .which = "/optimizer/type " + rule + " with schedule " + options_.program.schedule,
              .expected = "an optimizer that takes sums of gradients",
              .hint = "another optimizer, or another zeroth.pipeline.schedule"});
  }

  void tell_of_late() const {
    std::string steps;
    for (const int late : options_.program.late) steps += (steps.empty() ? "" : ", ") + std::to_string(late);
    runtime_->log().progress("the run is inexact: pipeline schedule " + options_.program.schedule +
                             ", gradients of chunks are late by " + steps +
                             " steps; checkpoints do not have those that are under way");
  }

  /// A step in which no backward is due on this rank: it contributes nothing.
  void take_no_part() {
    runtime_->core().begin_part({.micro_step = options_.program.micro_batches - 1});
    const std::uint64_t seen = runtime_->open_backward_of_part();
    runtime_->close_backward(seen);
  }

  /// At the end of a step.
  void age() {
    if (result_ && !result_->committed) return begin_anew("a step that was skipped");
    ++late_steps_;
    if (options_.aged) options_.aged(true);
  }

  void begin_anew(const char* after) {
    const bool any = late_steps_ > 0 || !kept_.empty();
    kept_.clear();
    kept_bytes_ = 0;
    gradients_.clear();
    late_steps_ = 0;
    if (options_.aged) options_.aged(false);
    if (!any) return;
    ++report_.begun_anew;
    if (runtime_->core().rank() == 0)
      runtime_->log().progress(std::string("late gradients are forgotten after ") + after + ": they begin anew");
  }

  [[nodiscard]] Buffers buffers_of(int chunk) const {
    return [this, chunk] { return options_.buffers ? options_.buffers(chunk) : std::vector<at::Tensor>(); };
  }

  struct Ran {
    ChunkValues outputs;
    InFlight flight;
  };

  Ran run_chunk(const Action& action, SentValues given, const ChunkForward& run) {
    Ran ran;
    for (std::size_t index = 0; index < given.tensors.size(); ++index) {
      at::Tensor& tensor = given.tensors[index];
      if (given.has_gradient[index] && at::GradMode::is_enabled()) tensor.requires_grad_(true);
      ran.flight.inputs.push_back(tensor);
    }
    {
      const PartScope part(*runtime_);
      // Blocks have hooks of their own; what they leave is the root unit's.
      const bool uses_root = std::ranges::find(units_of(action.chunk), 0) != units_of(action.chunk).end();
      UnitScope scope(uses_root ? runtime_ : nullptr, 0);
      const int earlier = options_.program.lateness(action) * options_.program.micro_batches;
      ran.outputs = run(action.chunk, action.micro_batch - earlier,
                        {.tensors = std::move(given.tensors), .structure = std::move(given.structure)});
      scope.finish(ran.outputs.tensors);
    }
    if (is_last(action.chunk) && head_) {
      ran.outputs.tensors = {head_->take_output(ran.outputs.tensors, action)};
    } else if (is_last(action.chunk)) {
      require_loss(ran.outputs, action);
      ran.outputs.tensors.resize(1);
      if (at::GradMode::is_enabled()) ran.flight.loss = {first_gradient(ran.outputs.tensors[0])};
    }
    ran.flight.graph = ChunkGraph(ran.flight.inputs, ran.outputs.tensors);
    return ran;
  }

  /// What a forward gives: the loss, or values of the next chunk.
  void pass_on(const Action& action, ChunkValues outputs) {
    if (is_last(action.chunk)) {
      if (head_) return;  // the scores of its rows give the loss
      losses_ += outputs.tensors[0].item<double>();
      return;
    }
    SentValues next{.structure = std::move(outputs.structure)};
    for (const at::Tensor& tensor : outputs.tensors) {
      next.has_gradient.push_back(tensor.defined() && tensor.requires_grad());
      next.tensors.push_back(tensor.defined() ? tensor.detach() : tensor);
    }
    const Held to{action.chunk + 1, held_key(action).second};
    (is_here(to.first) ? values_ : sent_values_).insert_or_assign(to, std::move(next));
  }

  /// Until its backward.
  void hold(const Action& action, InFlight flight) {
    flights_.insert_or_assign(held_key(action), std::move(flight));
    report_.live_peak = std::max(report_.live_peak, static_cast<int>(flights_.size()));
  }

  void backward(const Action& action) {
    const Held key = held_key(action);
    ran_backward_ = true;
    InFlight& flight = flights_.at(key);
    std::vector<at::Tensor> gradients;
    if (action.kind != ActionKind::kBackwardWeight) {
      if (is_last(action.chunk)) {
        gradients = head_ ? std::vector{head_->input_gradient(action.micro_batch)} : flight.loss;
      } else {
        gradients = in_scale_of_now(take(gradients_, key));
      }
    }
    zeroth::Engine& core = runtime_->core();
    core.begin_part(part_of(action));
    const WithoutParameters without(*runtime_, action.kind == ActionKind::kBackwardWeight);
    if (action.kind != ActionKind::kBackwardWeight && runtime_->counts_uses()) flight.uses = flight.graph.uses();
    const std::uint64_t seen = runtime_->open_backward_of_part(&flight.uses);
    try {
      switch (action.kind) {
        case ActionKind::kBackwardInput:
          flight.graph.backward_inputs(gradients);
          break;
        case ActionKind::kBackwardWeight:
          flight.graph.backward_weights();
          break;
        default:
          flight.graph.backward(gradients);
          break;
      }
    } catch (...) {
      runtime_->fail_backward();
      throw;
    }
    runtime_->close_backward(seen);
    if (action.kind != ActionKind::kBackwardWeight && action.chunk > 0) {
      SentValues back{.tensors = flight.graph.take_input_gradients()};
      back.has_gradient.assign(back.tensors.size(), false);
      const Held to{action.chunk - 1, key.second};
      if (is_here(to.first)) {
        put_gradient(to, std::move(back));
      } else {
        sent_gradients_.insert_or_assign(to, std::move(back));
      }
    }
    if (!is_last_of_backward(action.kind)) return;
    report_.weights_deferred += flight.graph.deferred();
    report_.weights_whole += flight.graph.whole();
    flights_.erase(key);
  }

  [[nodiscard]] bool is_here(int chunk) const { return stage_of(chunk) == stages_.rank(); }

  struct GivenGradient {
    SentValues values{};
    double scale = 1.0;  ///< the loss scale that it has
  };

  void put_gradient(const Held& to, SentValues values) {
    gradients_.insert_or_assign(to, GivenGradient{std::move(values), runtime_->scale_inside()});
  }

  /// The scale may have grown since a late gradient came.
  [[nodiscard]] std::vector<at::Tensor> in_scale_of_now(GivenGradient given) const {
    const double factor = runtime_->scale_inside() / given.scale;
    if (factor == 1.0) return std::move(given.values.tensors);
    const at::NoGradGuard no_grad;
    for (at::Tensor& tensor : given.values.tensors)
      if (tensor.defined()) tensor = tensor.mul(factor);
    return std::move(given.values.tensors);
  }

  template <class Values>
  static Values take(std::map<Held, Values>& from, const Held& key) {
    const auto found = from.find(key);
    ZR_CHECK(found != from.end(), ErrorCode::kInternal, "values that a chunk needs are not there",
             {.where = kWhere,
              .which = "chunk " + std::to_string(key.first) + ", micro-batch " + std::to_string(key.second)});
    Values values = std::move(found->second);
    from.erase(found);
    return values;
  }

  void send(const Action& action, int to, const Parcel& parcel) {
    auto& sent = parcel.is_gradient ? sent_gradients_ : sent_values_;
    links_.send(to, parcel, take(sent, {parcel.chunk, held_key(action).second}));
  }

  void receive(const Action& action, int from, const Parcel& parcel) {
    SentValues values = links_.receive(from, parcel);
    const Held to = held_key(action);
    if (parcel.is_gradient) return put_gradient(to, std::move(values));
    values_.insert_or_assign(to, std::move(values));
  }

  static void require_loss(const ChunkValues& outputs, const Action& action) {
    ZR_CHECK(
        !outputs.tensors.empty() && outputs.tensors[0].defined() && outputs.tensors[0].numel() == 1, ErrorCode::kModel,
        "the last chunk of a pipeline gives no loss",
        {.where = kWhere,
         .which = to_text(action),
         .expected = "a tensor of one element",
         .got = outputs.tensors.empty() || !outputs.tensors[0].defined()
                    ? "no tensor"
                    : outputs.tensors[0].toString() + " " + c10::str(outputs.tensors[0].sizes()),
         .hint =
             "the last layer returns the loss; in Python give the model labels, or a loss_fn to zeroth.pipeline()"});
  }

  [[nodiscard]] at::Tensor first_gradient(const at::Tensor& loss) const {
    const at::NoGradGuard no_grad;
    const at::Tensor scaled = runtime_->first_gradient(loss, {});
    return scaled.defined() ? scaled : at::full_like(loss, 1.0);
  }

  [[nodiscard]] double mean_loss(int micro_batches) {
    // Ranks of the last chunk have it, one of each pipeline.
    const bool has_loss = stage_of(options_.program.chunks() - 1) == stages_.rank();
    const double own = has_loss ? (head_ ? head_->losses() : losses_) / micro_batches * stages_.size() : 0.0;
    return runtime_->core().average(own);
  }

  template <class Body>
  void guarded(const Body& body) {
    try {
      body();
    } catch (...) {
      forget();
      throw;
    }
  }

  void forget() noexcept {
    flights_.clear();
    kept_.clear();
    kept_bytes_ = 0;
    values_.clear();
    gradients_.clear();
    sent_values_.clear();
    sent_gradients_.clear();
    if (head_) head_->forget();
    links_.abandon();
    running_ = evaluates_ = false;
  }

  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<RankActivity> activity_;  ///< null: nobody watches
  Communicator stages_;
  PipelineOptions options_;
  StageLinks links_;
  std::optional<SharedHeadRun> head_;  ///< of a program with V_ actions
  std::uint64_t digest_ = 0;
  std::uint64_t step_ = 0;
  bool running_ = false;
  bool evaluates_ = false;
  bool keeps_parameters_ = false;                   ///< from UNSHARD to RESHARD
  std::string failed_;                              ///< the action that threw, so that no step follows; "": none
  std::map<Key, std::vector<int>> completed_in_;    ///< units that no later backward of the micro-batch is of
  std::map<Key, std::vector<int>> last_backwards_;  ///< of these, units that no later one of the step is of
  std::int64_t late_steps_ = 0;                     ///< since late gradients began; see [Note: Late gradients]
  std::uint64_t loads_ = 0;                         ///< Runtime::loads() of then
  bool ran_backward_ = false;                       ///< in this step
  std::map<Held, InFlight> flights_;
  std::set<Key> recomputed_;          ///< by the program
  std::map<Held, KeptForward> kept_;  ///< between F and RECOMPUTE
  std::size_t kept_bytes_ = 0;
  std::map<Held, SentValues> values_;        ///< inputs of this rank's chunks
  std::map<Held, GivenGradient> gradients_;  ///< of outputs of this rank's chunks
  std::map<Held, SentValues> sent_values_;   ///< computed here, for other ranks
  std::map<Held, SentValues> sent_gradients_;
  std::optional<StepResult> result_;
  double losses_ = 0.0;
  PipelineReport report_;
};

Pipeline::Pipeline(EngineBase& engine, Communicator stages, PipelineOptions options)
    : impl_(std::make_unique<Impl>(engine, std::move(stages), std::move(options))) {}
Pipeline::~Pipeline() = default;

Pipeline::Result Pipeline::train_batch() {
  return impl_->train();
}
double Pipeline::eval_batch(int micro_batches) {
  return impl_->evaluate(micro_batches);
}
at::Tensor Pipeline::logits(const at::Tensor& input) {
  return impl_->logits(input);
}
void Pipeline::begin() {
  impl_->begin();
}
void Pipeline::run(const Action& action) {
  impl_->run(action);
}
Pipeline::Result Pipeline::end() {
  return impl_->end();
}
const StepProgram& Pipeline::program() const {
  return impl_->program();
}
const std::vector<Action>& Pipeline::actions() const {
  return impl_->actions();
}
int Pipeline::stage() const {
  return impl_->stage();
}
std::string Pipeline::failed_action() const {
  return impl_->failed_action();
}
PipelineReport Pipeline::report() const {
  return impl_->report();
}
void Pipeline::reset_report() {
  impl_->reset_report();
}

}  // namespace zeroth::libtorch
