#include "process/fault_cases.h"

#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <thread>
#include <utility>

namespace zeroth::test {
namespace {

constexpr int kStep = 3;  // from 0: step 4 in messages
constexpr int kUnit = 2;  // blocks.1
constexpr Milliseconds kShortTimeout{3'000};
constexpr Milliseconds kSoon{1'500};
constexpr double kDeathSeconds = 2;  ///< a death and a lost connection are seen at once, and not by a clock

using Action = std::function<void(RankHere& here)>;

/// `action` on the rank in step kStep, once, at this moment.
Happening at(Times& times, int rank, Moment when, Action action, int unit = -1) {
  return [&times, rank, when, action = std::move(action), unit](RankHere& here, Moment moment, int of) {
    if (here.world.rank() != rank || here.step != kStep || moment != when || of != unit) return;
    times.strike();
    action(here);
  };
}

void hang(RankHere& here) {
  here.world.activity()->at();  // a native program's own word
  for (;;) std::this_thread::sleep_for(Milliseconds{1'000});
}
void spin(RankHere& /*here*/) {
  for (volatile bool always = true; always;) {
  }
}
Action raises(int signal) {
  return [signal](RankHere&) { ::raise(signal); };
}

/// Ends the connections of this process of one kind, as an unplugged cable and a firewall's reset do.
void cut(int domain) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(entry.path().filename().c_str());
    int value = 0;
    socklen_t size = sizeof value;
    if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &value, &size) == 0 && value == domain) ::shutdown(fd, SHUT_RDWR);
  }
}

Told lost(std::vector<std::string> words) {
  return {ErrorCode::kPeerLost, std::move(words)};
}
Told differ(std::vector<std::string> words) {
  return {ErrorCode::kMismatch, std::move(words)};
}
Told late(std::vector<std::string> words) {
  return {ErrorCode::kTimeout, std::move(words)};
}
Told stopped(std::vector<std::string> words) {
  return {ErrorCode::kAborted, std::move(words)};
}
Told alike(ErrorCode code, std::vector<std::string> words) {
  return {code, std::move(words), true};
}

/// Where the others are over shared memory when a rank goes in the forward or in the backward: they need nobody before
/// these.
const std::string kNextOverMemory = R"((a bucket slot held by unit blocks\.2|step\(\) of all ranks))";

class Cases {
 public:
  /// A fault of a rank at a moment of step kStep.
  FaultCase& add(std::string name, std::string what, Moment when, Action action, int unit = -1, int guilty = 2) {
    FaultCase& fault = add(std::move(name), std::move(what), guilty);
    fault.arrange = [=](WatchedJob& job, Times& times) { job.happen = at(times, guilty, when, action, unit); };
    return fault;
  }
  FaultCase& add(std::string name, std::string what, int guilty = 2) {
    FaultCase& fault = cases_.emplace_back();
    fault.name = std::move(name);
    fault.what = "rank " + std::to_string(guilty) + " " + std::move(what);
    fault.guilty = guilty;
    return fault;
  }
  /// All so far.
  void end_within(double seconds) {
    for (FaultCase& fault : cases_) fault.within_s = seconds;
  }
  [[nodiscard]] std::vector<FaultCase> take() { return std::move(cases_); }

 private:
  std::vector<FaultCase> cases_;
};

void add_ends(Cases& cases) {
  const std::string killed = R"(rank 2 \(pid \d+\) was killed by SIGKILL \(signal 9\))";
  /// Over messages the control plane says it, with the host.
  const auto ended = [](int rank, const std::string& how) {
    return "rank " + std::to_string(rank) + R"( \(pid \d+ on [^)]+\) )" + how;
  };
  const std::string killed_far = ended(2, R"(was killed by SIGKILL \(signal 9\))");
  cases.add("KilledInForward", "is killed in the forward of blocks.1", Moment::kForward, raises(SIGKILL), kUnit)
      .says(lost({killed, kNextOverMemory}), lost({killed_far, R"(the parameters of unit blocks\.2)"}));
  cases.add("KilledBeforeBackward", "is killed between forward and backward", Moment::kBackward, raises(SIGKILL), 0)
      .says(lost({killed, kNextOverMemory}), lost({killed_far, R"(the gradients of unit blocks\.2)"}));
  cases.add("KilledInBackward", "is killed in the backward of blocks.1", Moment::kBackward, raises(SIGKILL), kUnit)
      .says(lost({killed, kNextOverMemory}), lost({killed_far, R"(the gradients of unit blocks\.1)"}));
  FaultCase& in_step = cases.add("KilledInStep", "is killed in step(), before the update");
  in_step.says(lost({killed, "the loss metrics"}), lost({killed_far, "the loss metrics"}));
  in_step.failpoints = "engine.update@hit=4:kill";
  cases.add("KilledHub", "is killed in the forward of blocks.1", Moment::kForward, raises(SIGKILL), kUnit, 0)
      .says(lost({R"(rank 0 \(pid \d+\) was killed by SIGKILL)", kNextOverMemory}),
            lost({ended(0, "was killed by SIGKILL"), R"(the parameters of unit blocks\.2)"}));
  cases.add("Crashes", "crashes in the forward of blocks.1 (SIGSEGV)", Moment::kForward, raises(SIGSEGV), kUnit)
      .says(lost({R"(rank 2 \(pid \d+\) was killed by SIGSEGV \(signal 11\))", kNextOverMemory}),
            lost({ended(2, R"(was killed by SIGSEGV \(signal 11\))"), R"(the parameters of unit blocks\.2)"}));
  cases.add("ExitsSilently", "calls _exit(3) between steps", Moment::kBegin, [](RankHere&) { ::_exit(3); })
      .says(lost({R"(rank 2 \(pid \d+\) exited with code 3 before the others were done)", kNextOverMemory}),
            lost({ended(2, "exited with code 3"), "the parameters of unit root"}));
  const auto leaves = [](RankHere& here) { here.turn.leaves = true; };
  const auto left_after = [](int rank, const std::string& end, const std::string& meanwhile) {
    return R"(rank )" + std::to_string(rank) + R"( \(pid \d+ on [^)]+\) left early: it ended )" + end +
           R"(, while rank \d is in )" + meanwhile;
  };
  const std::string fewer =
      R"(the (forward|backward) of unit \S+ of step 4: unequal batch counts\?.*engine\.batches\(loader\).*zeroth\.uneven = "join")";
  cases.add("LeavesEarly", "has fewer batches: its loop ends, exit code 0", Moment::kBegin, leaves)
      .says(lost({left_after(2, "after 3 steps", fewer), kNextOverMemory}),
            lost({left_after(2, "after 3 steps", fewer), "the parameters of unit root"}));
  cases.add("HubLeavesEarly", "has fewer batches: its loop ends, exit code 0", Moment::kBegin, leaves, -1, 0)
      .says(lost({left_after(0, "after 3 steps", fewer), kNextOverMemory}),
            lost({left_after(0, "after 3 steps", fewer), "the parameters of unit root"}));
  /// `action` on the others in place of step kStep, when the guilty rank leaves.
  const auto left_alone = [&](std::string name, std::string what, int step, Action action) -> FaultCase& {
    FaultCase& fault = cases.add(std::move(name), std::move(what));
    fault.arrange = [step, action = std::move(action)](WatchedJob& job, Times& times) {
      job.happen = [&times, step, action](RankHere& here, Moment moment, int) {
        if (here.step != step || moment != Moment::kBegin) return;
        if (here.world.rank() == 2) times.strike();
        here.turn.leaves = here.world.rank() == 2;
        if (here.world.rank() != 2) action(here);
      };
    };
    return fault;
  };
  const std::string some = R"(: a call that only some ranks make\?.*`if rank == 0`)";
  left_alone("LeavesBeforeAnAverage", "ends after its loop, where the others call average()", kStep,
             [](RankHere& here) { (void)here.engine.average(1.0); })
      .says(lost({left_after(2, "after 3 steps", "a call of all ranks, after step 3" + some), R"(average\(\))"}));
  left_alone("LeavesBeforeAnEvaluation", "ends after its loop, where the others evaluate", kStep,
             [](RankHere& here) {
               (void)here.model.evaluate(7, 0);
               here.turn.leaves = true;
             })
      .says(std::nullopt,
            lost({left_after(2, "after 3 steps", "a forward without gradients of unit root, after step 3" + some),
                  "the parameters of unit root"}));
  left_alone("LeavesBeforeItsFirstStep", "ends before its first step, exit code 0", 0, [](RankHere&) {})
      .says(lost({left_after(2, "before its first step", R"(the (forward|backward) of unit \S+ of step 1; )"),
                  "see where that rank returned or threw"}));
  cases
      .add(
          "Throws", "throws an exception in the forward of blocks.1", Moment::kForward,
          [](RankHere&) { throw std::runtime_error("no such token: 50257"); }, kUnit)
      .says(stopped({R"(rank 2 stopped the job: \[USER\] no such token: 50257)"}));
  cases
      .add(
          "OutOfMemory", "has no memory left in the backward of blocks.1", Moment::kBackward,
          [](RankHere&) { throw std::bad_alloc(); }, kUnit)
      .says(stopped({R"(rank 2 stopped the job: \[OUT_OF_MEMORY\] an allocation failed; got: std::bad_alloc)"}));
  cases
      .add("Aborts", "stops the job with an error of its own", Moment::kTrained,
           [](RankHere&) { throw Error(ErrorCode::kUsage, "the validation set is empty", {.where = "evaluate"}); })
      .says(stopped({R"(rank 2 stopped the job: \[USAGE\] the validation set is empty)"}));
  FaultCase& transport = cases.add("TransportFails", "fails inside its transport, in a sum");
  transport.says(
      stopped({R"(rank 2 stopped the job: \[INTERNAL\] planted failure at (shm|messages)\.all_reduce\.mid)"}));
  transport.failpoints = "shm.all_reduce.mid@hit=12:throw;messages.all_reduce.mid@hit=12:throw";
}

void add_hangs(Cases& cases) {
  const auto patient = [](FaultCase& fault) -> FaultCase& {
    fault.deaf = true;
    fault.arrange = [inner = fault.arrange](WatchedJob& job, Times& times) {
      job.options.timeout = job.options.first_timeout = kShortTimeout;
      job.options.end_stuck_after = kSoon;
      if (inner) inner(job, times);
    };
    return fault;
  };
  const auto still = [](FaultCase& fault) -> FaultCase& {
    fault.hangs = true;
    return fault;
  };
  const std::string frozen = R"(rank 2 \(pid [^)]*\) (is frozen: no heartbeat for|has given no sign of life for))";
  still(cases.add("Stopped", "is stopped between steps (SIGSTOP)", Moment::kBegin, raises(SIGSTOP)))
      .says(lost({frozen, kNextOverMemory}), lost({frozen, "the parameters of unit root"}));
  still(cases.add("StoppedInBackward", "is stopped in the backward of blocks.1 (SIGSTOP)", Moment::kBackward,
                  raises(SIGSTOP), kUnit))
      .says(lost({frozen, kNextOverMemory}), lost({frozen, R"(the gradients of unit blocks\.1)"}));
  const std::string hub_frozen =
      R"(rank 0 (\(pid [^)]*\) )?(is frozen: no heartbeat for|has given no sign of life for))";
  still(cases.add("HubStopped", "is stopped in the forward of blocks.1 (SIGSTOP)", Moment::kForward, raises(SIGSTOP),
                  kUnit, 0))
      .says(lost({hub_frozen, kNextOverMemory}), lost({hub_frozen, R"(the parameters of unit blocks\.2)"}));
  const auto is = [](int rank, const std::string& doing) {
    return R"(no answer within 3\.0 s: rank )" + std::to_string(rank) + R"( \(pid \d+ on [^)]+\) is )" + doing;
  };
  patient(cases.add("Sleeps", "sleeps between steps, longer than the timeout", Moment::kBegin, hang))
      .says(late({is(2, R"(between steps, after step 3, at fault_cases\.cpp:?\d* in hang,)"),
                  "wait for " + kNextOverMemory}),
            late({is(2, "between steps, after step 3"), "wait for .*the parameters of unit root"}));
  patient(cases.add("HubSleeps", "sleeps between steps, longer than the timeout", Moment::kBegin, hang, -1, 0))
      .says(late({is(0, "between steps, after step 3"), "wait for " + kNextOverMemory}),
            late({is(0, "between steps, after step 3"), "wait for .*the parameters of unit root"}));
  patient(cases.add("SpinsInForward", "spins in the forward of blocks.1", Moment::kForward, spin, kUnit))
      .says(late({is(2, R"(in the forward of unit blocks\.1 of step 4)"), "wait for " + kNextOverMemory}),
            late({is(2, R"(in the forward of unit blocks\.1 of step 4)"),
                  R"(wait for .*the parameters of unit blocks\.2)"}));
  patient(cases.add("SpinsInBackward", "spins in the backward of blocks.1", Moment::kBackward, spin, kUnit))
      .says(late({is(2, R"(in the backward of unit blocks\.1 of step 4)"), "wait for " + kNextOverMemory}),
            late({is(2, R"(in the backward of unit blocks\.1 of step 4)"),
                  R"(wait for .*the gradients of unit blocks\.1)"}));
  FaultCase& absent = patient(cases.add("NeverComes", "never comes to the rendezvous"));
  absent.says(late({"not all ranks came: missing rank 2"}),
              late({R"(no answer within 3\.0 s)", "all_gather#0 .* from rank 2"}));
  absent.absent = absent.hangs = true;
  absent.deaf = false;
}

void add_calls(Cases& cases) {
  const std::string loss = "the loss metrics on rank [013]";
  cases
      .add("SkipsSmallSum", "skips a small all_reduce of its own", Moment::kBegin,
           [](RankHere& here) { here.turn.loss = false; })
      .says(differ({loss, "the token counts on rank 2"}));
  const std::string counts = "ranks 0, 1, 3 wait for all_reduce#7 .*the token counts";
  cases
      .add("SkipsLargeSum", "skips a large all_reduce of its own", Moment::kBegin,
           [](RankHere& here) { here.turn.counts = false; })
      .says(differ({counts, "rank 2 waits for " + kNextOverMemory}),
            differ({counts, "rank 2 waits for .*the parameters of unit root"}));
  cases
      .add("SwapsSums", "makes two all_reduces of equal shape in swapped order", Moment::kStepped,
           [](RankHere& here) {
             here.turn.loss = here.turn.counts = false;
             sum_counts(here.own, 4);
             sum_loss(here.own, 4);
           })
      .says(differ({loss, "the token counts on rank 2", R"(4 elements \(16 B\).* \(rank 2\))"}));
  cases
      .add("OtherSize", "sums 3 floats where the others sum 4", Moment::kStepped,
           [](RankHere& here) {
             here.turn.loss = false;
             sum_loss(here.own, 3);
           })
      .says(differ({loss, "4 elements", R"(3 elements \(12 B\).* \(rank 2\))"}));
  cases
      .add("OtherType", "sums doubles where the others sum floats", Moment::kStepped,
           [](RankHere& here) {
             here.turn.loss = false;
             std::vector<double> values(4, 1.0);
             here.own.all_reduce(std::span(values), MessageTag{.label = kLossTag});
           })
      .says(differ({loss, "float32", R"(float64, 4 elements .* \(rank 2\))"}));
  cases
      .add("OtherOp", "takes the maximum where the others sum", Moment::kStepped,
           [](RankHere& here) {
             here.turn.loss = false;
             std::vector<float> values(4, 1.0F);
             here.own.all_reduce(std::span(values), ReduceOp::kMax, MessageTag{.label = kLossTag});
           })
      .says(differ({loss, R"(max float32, 4 elements .* \(rank 2\))"}));
  cases
      .add("OtherCall", "gathers where the others sum", Moment::kStepped,
           [](RankHere& here) {
             here.turn.loss = false;
             const std::vector<float> part(1, 1.0F);
             std::vector<float> values(4, 1.0F);
             here.own.all_gather(std::span(part), std::span(values), MessageTag{.label = kLossTag});
           })
      .says(differ({loss, "all_reduce#6", R"(all_gather#6 .* \(rank 2\))"}));
  cases
      .add(
          "AverageOnOneRank", "calls average() under `if rank == 0`", Moment::kBegin,
          [](RankHere& here) { (void)here.engine.average(1.0); }, -1, 0)
      .says(differ({R"((average\(\) on rank 0|rank 0 waits for average\(\)))", R"(step\(\))"}),
            differ({R"(average\(\) on rank 0)", "the parameters of unit root on rank [123]"}));
  cases
      .add(
          "ExportOnOneRank", "exports the weights under `if rank == 0`", Moment::kBegin,
          [](RankHere& here) {
            here.engine.sync(here.exports);
            (void)here.model.value(0);
          },
          -1, 0)
      .says(differ({"(an export on rank 0|rank 0 waits for an export)", R"(step\(\))"}),
            differ({"an export on rank 0", "the parameters of unit root on rank [123]"}));
  cases
      .add(
          "ReadsOnOneRank", "reads a parameter under `if rank == 0`", Moment::kBegin,
          [](RankHere& here) { (void)here.model.value(3); }, -1, 0)
      .says(std::nullopt,
            differ({R"(the parameters of unit blocks\.0 on rank 0)", "the parameters of unit root on rank [123]"}));
  cases
      .add(
          "EvaluatesOnOneRank", "evaluates under `if rank == 0`", Moment::kBegin,
          [](RankHere& here) { (void)here.model.evaluate(7, 0); }, -1, 0)
      .says(std::nullopt,
            differ({"the parameters of unit root on rank 0", R"(the gradients of unit blocks\.2 on rank [123])"}));
  cases
      .add("StrayBarrier", "calls barrier() once more than the others", Moment::kTrained,
           [](RankHere& here) { here.engine.barrier(); })
      .says(differ({R"((barrier\(\) on rank 2|rank 2 waits for barrier\(\)))", R"(step\(\))"}),
            differ({R"(barrier\(\) on rank 2)", R"(step\(\) on rank [013])"}));
}

void add_steps(Cases& cases) {
  cases.add("SkipsStep", "leaves a step() out", Moment::kBegin, [](RankHere& here) { here.turn.step = false; })
      .says(differ({R"(ranks 0, 1, 3 wait for .*step\(\))", "rank 2 waits for all_reduce#6 .*the loss metrics"}));
  cases
      .add("SkipsBackward", "leaves forward and backward out", Moment::kBegin,
           [](RankHere& here) { here.turn.backward = false; })
      .says(alike(ErrorCode::kUsage, {R"(step\(\) without a backward since the last step\(\))", "who: rank 2/4"}),
            differ({R"(step\(\) on rank 2)", "the parameters of unit root on rank [013]"}));
  cases.add("StepsTwice", "calls step() twice", Moment::kStepped, [](RankHere& here) { (void)here.engine.step(); })
      .says(differ({"ranks 0, 1, 3 wait for all_reduce#6 .*the loss metrics", R"(rank 2 waits for .*step\(\))"}));
  cases
      .add("DiscardsGradients", "calls zero_grad() where the others step()", Moment::kTrained,
           [](RankHere& here) {
             here.turn.step = false;
             here.engine.discard_gradients();
           })
      .says(differ({"some ranks discard their gradients", R"(zero_grad\(\) on rank 2/4)"}));
  cases
      .add("OtherRate", "sets another learning rate", Moment::kBegin,
           [](RankHere& here) { here.engine.set_group(0, GroupHyper{.lr = 0.5, .weight_decay = 0.1}); })
      .says(differ({"lr of parameter group 0", R"(0\.02 \(rank 0\))", R"(0\.5 \(rank 2\))"}));
  cases
      .add("BackwardFails", "catches an exception of its backward and calls step()", Moment::kTrained,
           [](RankHere& here) { here.engine.abandon(true); })
      .warning = "step skipped on all ranks: backward failed on rank 2";
}

void add_models(Cases& cases) {
  const auto tampered = [&](std::string name, std::string what,
                            std::function<void(ToyOptions&, EngineSettings&)> tamper) -> FaultCase& {
    FaultCase& fault = cases.add(std::move(name), std::move(what));
    fault.arrange = [tamper = std::move(tamper)](WatchedJob& job, Times& times) {
      job.tamper = [&times, tamper](int rank, ToyOptions& model, EngineSettings& settings) {
        if (rank != 2) return;
        times.strike();
        tamper(model, settings);
      };
    };
    return fault;
  };
  tampered("OtherWidth", "builds a model of another width",
           [](ToyOptions& model, EngineSettings&) { model.width = 14; })
      .says(differ(
          {R"(parameter in\.weight float32 \[12, 5\] .*\(rank 0\))", R"(in\.weight float32 \[14, 5\] .*\(rank 2\))"}));
  tampered("OtherDepth", "builds a model with one block more", [](ToyOptions& model, EngineSettings&) {
    model.blocks = 4;
  }).says(differ({R"(nothing more \(rank 0\))", R"(parameter blocks\.3\.weight .*\(rank 2\))"}));
  tampered("OtherFrozen", "freezes a weight that the others train", [](ToyOptions& model, EngineSettings&) {
    model.frozen_blocks = {1};
  }).says(differ({R"(blocks\.1\.weight .* trainable .*\(rank 0\))", R"(blocks\.1\.weight .* frozen .*\(rank 2\))"}));
  tampered("OtherConfiguration", "has another configuration", [](ToyOptions&, EngineSettings& settings) {
    settings.configuration = R"({"train_batch_size":16})";
  }).says(differ({"who: rank 2/4", "/train_batch_size: 12 here, 16 there"}));
  tampered("OtherStage", "asks for ZeRO stage 2 where the others ask for 3", [](ToyOptions&, EngineSettings& settings) {
    settings.plan = zero_plan(2, {"dp"});
  }).says(differ({R"(plan Flat Flat Flat .*\(rank 0\))", R"(plan Replicate Flat Flat .*\(rank 2\))"}));
  tampered("NoRoom", "may take too little memory",
           [](ToyOptions&, EngineSettings& settings) { settings.memory_limit_bytes = 1'000; })
      .says(alike(ErrorCode::kOutOfMemory,
                  {"the plan does not fit the memory that is there", "who: rank 2/4", "at most 1000 B", "zero-3"}));

  const auto branch = [&](std::string name, int stage, bool is_alone) -> FaultCase& {
    FaultCase& fault = cases.add(std::move(name), std::string(is_alone ? "alone runs" : "leaves out") +
                                                      " blocks.1 in step 4, ZeRO stage " + std::to_string(stage));
    fault.arrange = [stage, is_alone](WatchedJob& job, Times& times) {
      job.zero_stage = stage;
      job.skip = [&times, is_alone](int rank, std::int64_t step, int block) {
        if (block + 1 != kUnit || step != kStep) return false;
        if (rank == 2) times.strike();
        return (rank == 2) != is_alone;
      };
    };
    return fault;
  };
  const auto run_both = [](const std::string& units) {
    return "hint: ranks run different modules.*: run units " + units + " on every rank .*or train over shm";
  };
  const Told gradients =
      differ({R"(the gradients of unit blocks\.1 on rank [013])", R"(the gradients of unit blocks\.0 on rank 2)",
              run_both(R"(blocks\.0 and blocks\.1)")});
  branch("UnusedParameterStage0", 0, false).says(std::nullopt, gradients);
  branch("UnusedParameterStage2", 2, false).says(std::nullopt, gradients);
  branch("LeavesUnitOut", 3, false)
      .says(std::nullopt,
            differ({R"(the parameters of unit blocks\.1 on rank [013])",
                    R"(the parameters of unit blocks\.2 on rank 2)", run_both(R"(blocks\.1 and blocks\.2)")}));
  branch("RunsUnitAlone", 3, true)
      .says(std::nullopt,
            differ({R"(the parameters of unit blocks\.2 on rank [013])",
                    R"(the parameters of unit blocks\.1 on rank 2)", run_both(R"(blocks\.1 and blocks\.2)")}));

  const auto poisoned = [&](std::string name, std::string what, bool once) -> FaultCase& {
    FaultCase& fault = cases.add(std::move(name), std::move(what));
    fault.arrange = [once](WatchedJob& job, Times& times) {
      constexpr int kParam = 5;  // blocks.1.weight
      job.max_nonfinite_steps = 2;
      job.poison = [&times, once](int rank, std::int64_t step, int, int param) {
        if (rank != 2 || param != kParam || step < kStep || (once && step > kStep)) return false;
        times.strike();
        return true;
      };
    };
    return fault;
  };
  const std::string where = R"(non-finite gradient: parameter blocks\.1\.weight, rank 2)";
  poisoned("NanOnce", "has a NaN gradient once", true).warning = "step skipped on all ranks: " + where;
  poisoned("NanAlways", "has NaN gradients for two steps, and two are the limit", false)
      .says(alike(ErrorCode::kNonFinite, {where, "2 steps in a row"}));
}

void add_connections(Cases& cases) {
  FaultCase& control =
      cases.add("ControlLinkCut", "loses its control connection, then sleeps", Moment::kBegin, [](RankHere& here) {
        cut(AF_INET);
        hang(here);
      });
  const std::string ended =
      R"(rank 2 \(pid [^)]*\) is gone: its control connection ended without a goodbye \(it has closed the connection\))";
  control.says(lost({ended, kNextOverMemory}), lost({ended, "the parameters of unit root"}));
  control.hangs = true;
  control.within_s = kDeathSeconds;
  FaultCase& data =
      cases.add("DataLinkCut", "loses its connections to the others", Moment::kBegin, [](RankHere&) { cut(AF_UNIX); });
  data.says(lost({"rank 2 closed its connection", "the parameters of unit root"}));
  data.only = Over::kMessages;
  data.within_s = kDeathSeconds;
  FaultCase& memory = cases.add("NoMemfd", "is refused memory by its kernel");
  memory.says(Told{ErrorCode::kResource, {"memfd_create failed on rank 2: Too many open files"}});
  memory.failpoints = "system.memfd_create:errno=EMFILE";
  memory.only = Over::kMemory;
}

}  // namespace

std::vector<FaultCase> fault_cases() {
  Cases cases;
  add_ends(cases);
  cases.end_within(kDeathSeconds);
  add_hangs(cases);
  add_calls(cases);
  add_steps(cases);
  add_models(cases);
  add_connections(cases);
  return cases.take();
}

}  // namespace zeroth::test
