#include "process/fault_cases.h"

#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <thread>
#include <utility>

#include <zeroth/zero/gradient_store.h>

namespace zeroth::testing {
namespace {

constexpr int kStep = 3;  // from 0: step 4 in messages
constexpr int kUnit = 2;  // blocks.1
constexpr Milliseconds kShortTimeout{3'000};

using Action = std::function<void(RankHere& here)>;

/// `action` on the rank in step kStep, once, at this moment.
Happening at(Times& times, int rank, Moment when, Action action, int unit = -1) {
  return [&times, rank, when, action = std::move(action), unit](RankHere& here, Moment moment, int of) {
    if (here.world.rank() != rank || here.step != kStep || moment != when || of != unit) return;
    times.strike();
    action(here);
  };
}

void hang(RankHere& /*here*/) {
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

[[maybe_unused]] Told lost(std::vector<std::string> words) { return {ErrorCode::kPeerLost, std::move(words)}; }
[[maybe_unused]] Told differ(std::vector<std::string> words) { return {ErrorCode::kMismatch, std::move(words)}; }
[[maybe_unused]] Told late(std::vector<std::string> words) { return {ErrorCode::kTimeout, std::move(words)}; }
[[maybe_unused]] Told stopped(std::vector<std::string> words) { return {ErrorCode::kAborted, std::move(words)}; }

/// Both transports alike.
[[maybe_unused]] FaultCase& alike(FaultCase& fault, const Told& told) {
  fault.memory = told;
  fault.messages = told;
  return fault;
}

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
  [[nodiscard]] std::vector<FaultCase> take() { return std::move(cases_); }

 private:
  std::vector<FaultCase> cases_;
};

void add_ends(Cases& cases) {
  cases.add("KilledInForward", "is killed in the forward of blocks.1", Moment::kForward, raises(SIGKILL), kUnit);
  cases.add("KilledBeforeBackward", "is killed between forward and backward", Moment::kBackward, raises(SIGKILL), 0);
  cases.add("KilledInBackward", "is killed in the backward of blocks.1", Moment::kBackward, raises(SIGKILL), kUnit);
  cases.add("KilledInStep", "is killed in step(), before the update").failpoints = "engine.update@hit=4:kill";
  cases.add("KilledHub", "is killed in the forward of blocks.1", Moment::kForward, raises(SIGKILL), kUnit, 0);
  cases.add("Crashes", "crashes in the forward of blocks.1 (SIGSEGV)", Moment::kForward, raises(SIGSEGV), kUnit);
  cases.add("ExitsSilently", "calls _exit(3) between steps", Moment::kBegin, [](RankHere&) { ::_exit(3); });
  cases.add("LeavesEarly", "has fewer batches: its loop ends, exit code 0", Moment::kBegin, [](RankHere& here) { here.turn.leaves = true; });
  cases.add("HubLeavesEarly", "has fewer batches: its loop ends, exit code 0", Moment::kBegin, [](RankHere& here) { here.turn.leaves = true; }, -1, 0);
  cases.add("Throws", "throws std::runtime_error in the forward of blocks.1", Moment::kForward, [](RankHere&) { throw std::runtime_error("no such token: 50257"); }, kUnit);
  cases.add("OutOfMemory", "has no memory left in the backward of blocks.1", Moment::kBackward, [](RankHere&) { throw std::bad_alloc(); }, kUnit);
  cases.add("Aborts", "stops the job with an error of its own", Moment::kTrained, [](RankHere&) {
    throw Error(ErrorCode::kUsage, "the validation set is empty", {.where = "evaluate", .who = "rank 2/4"});
  });
  FaultCase& transport = cases.add("TransportFails", "fails inside the transport, in an all_gather or all_reduce of step 4");
  transport.failpoints = "shm.all_reduce.mid@hit=12:throw;messages.all_reduce.mid@hit=12:throw";
}

void add_hangs(Cases& cases) {
  const auto patient = [](FaultCase& fault) {
    fault.hangs = true;
    fault.arrange = [inner = fault.arrange](WatchedJob& job, Times& times) {
      job.options.timeout = job.options.first_timeout = kShortTimeout;
      inner(job, times);
    };
  };
  cases.add("Stopped", "is stopped between steps (SIGSTOP)", Moment::kBegin, raises(SIGSTOP)).hangs = true;
  cases.add("StoppedInBackward", "is stopped in the backward of blocks.1 (SIGSTOP)", Moment::kBackward, raises(SIGSTOP), kUnit).hangs = true;
  cases.add("HubStopped", "is stopped in the forward of blocks.1 (SIGSTOP)", Moment::kForward, raises(SIGSTOP), kUnit, 0).hangs = true;
  patient(cases.add("Sleeps", "sleeps between steps, longer than the timeout", Moment::kBegin, hang));
  patient(cases.add("HubSleeps", "sleeps between steps, longer than the timeout", Moment::kBegin, hang, -1, 0));
  patient(cases.add("SpinsInForward", "spins in the forward of blocks.1", Moment::kForward, spin, kUnit));
  patient(cases.add("SpinsInBackward", "spins in the backward of blocks.1", Moment::kBackward, spin, kUnit));
  FaultCase& absent = cases.add("NeverComes", "never comes to the rendezvous");
  absent.absent = absent.hangs = true;
  absent.arrange = [](WatchedJob& job, Times&) { job.options.timeout = job.options.first_timeout = kShortTimeout; };
}

void add_calls(Cases& cases) {
  cases.add("SkipsSmallSum", "skips a small all_reduce of its own", Moment::kBegin, [](RankHere& here) { here.turn.loss = false; });
  cases.add("SkipsLargeSum", "skips a large all_reduce of its own", Moment::kBegin, [](RankHere& here) { here.turn.counts = false; });
  cases.add("SwapsSums", "makes two all_reduces of equal shape in swapped order", Moment::kStepped, [](RankHere& here) {
    here.turn.loss = here.turn.counts = false;
    sum_counts(here.own, 4);
    sum_loss(here.own, 4);
  });
  // The others make the same calls in the other order.
  cases.add("OtherSize", "sums 3 floats where the others sum 4", Moment::kStepped, [](RankHere& here) {
    here.turn.loss = false;
    sum_loss(here.own, 3);
  });
  cases.add("OtherType", "sums doubles where the others sum floats", Moment::kStepped, [](RankHere& here) {
    here.turn.loss = false;
    std::vector<double> values(4, 1.0);
    here.own.all_reduce(std::span(values), MessageTag{.label = kLossTag});
  });
  cases.add("OtherOp", "takes the maximum where the others sum", Moment::kStepped, [](RankHere& here) {
    here.turn.loss = false;
    std::vector<float> values(4, 1.0F);
    here.own.all_reduce(std::span(values), ReduceOp::kMax, MessageTag{.label = kLossTag});
  });
  cases.add("OtherCall", "gathers where the others sum", Moment::kStepped, [](RankHere& here) {
    here.turn.loss = false;
    const std::vector<float> part(1, 1.0F);
    std::vector<float> values(4, 1.0F);
    here.own.all_gather(std::span(part), std::span(values), MessageTag{.label = kLossTag});
  });
  cases.add("AverageOnOneRank", "calls average() under `if rank == 0`", Moment::kBegin, [](RankHere& here) { (void)here.engine.average(1.0); }, -1, 0);
  cases.add("ExportOnOneRank", "exports the weights under `if rank == 0`", Moment::kBegin, [](RankHere& here) {
    here.engine.meet(Meeting::kExport);
    (void)here.model.value(0);
  }, -1, 0);
  cases.add("ReadsOnOneRank", "reads a parameter under `if rank == 0`", Moment::kBegin, [](RankHere& here) { (void)here.model.value(3); }, -1, 0);
  cases.add("EvaluatesOnOneRank", "evaluates under `if rank == 0`", Moment::kBegin, [](RankHere& here) { (void)here.model.evaluate(7, 0); }, -1, 0);
  cases.add("StrayBarrier", "calls barrier() once more than the others", Moment::kTrained, [](RankHere& here) { here.engine.barrier(); });
}

void add_steps(Cases& cases) {
  cases.add("SkipsStep", "skips a step()", Moment::kBegin, [](RankHere& here) { here.turn.step = false; });
  cases.add("SkipsBackward", "skips forward and backward", Moment::kBegin, [](RankHere& here) { here.turn.backward = false; });
  cases.add("StepsTwice", "calls step() twice", Moment::kStepped, [](RankHere& here) { (void)here.engine.step(); });
  cases.add("DiscardsGradients", "calls zero_grad() where the others step()", Moment::kTrained, [](RankHere& here) {
    here.turn.step = false;
    here.engine.discard_gradients();
  });
  cases.add("OtherRate", "sets another learning rate", Moment::kBegin, [](RankHere& here) { here.engine.set_group(0, GroupHyper{.lr = 0.5, .weight_decay = 0.1}); });
  cases.add("BackwardFails", "catches an exception of its backward and calls step()", Moment::kTrained, [](RankHere& here) { here.engine.abandon(true); });
}

void add_models(Cases& cases) {
  const auto tampered = [&](std::string name, std::string what, std::function<void(ToyOptions&, EngineSettings&)> tamper) -> FaultCase& {
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
  tampered("OtherWidth", "builds a model of another width", [](ToyOptions& model, EngineSettings&) { model.width = 14; });
  tampered("OtherDepth", "builds a model with one block more", [](ToyOptions& model, EngineSettings&) { model.blocks = 4; });
  tampered("OtherFrozen", "freezes a weight that the others train", [](ToyOptions& model, EngineSettings&) { model.frozen_blocks = {1}; });
  tampered("OtherConfiguration", "has another configuration", [](ToyOptions&, EngineSettings& settings) {
    settings.configuration = R"({"train_batch_size":16})";
  });
  tampered("OtherStage", "asks for ZeRO stage 2 where the others ask for 3", [](ToyOptions&, EngineSettings& settings) { settings.plan = zero_plan(2, {"dp"}); });
  tampered("NoRoom", "may take too little memory", [](ToyOptions&, EngineSettings& settings) { settings.memory_limit_bytes = 1'000; });

  const auto branch = [&](std::string name, int stage, bool is_alone) {
    FaultCase& fault = cases.add(std::move(name),
                                 std::string(is_alone ? "alone runs" : "leaves out") + " blocks.1 in step 4, ZeRO stage " + std::to_string(stage));
    fault.arrange = [stage, is_alone](WatchedJob& job, Times& times) {
      job.zero_stage = stage;
      job.skip = [&times, is_alone](int rank, std::int64_t step, int block) {
        if (block + 1 != kUnit || step != kStep) return false;
        if (rank == 2) times.strike();
        return (rank == 2) != is_alone;
      };
    };
    return &fault;
  };
  branch("UnusedParameterStage0", 0, false);
  branch("UnusedParameterStage2", 2, false);
  branch("LeavesUnitOut", 3, false);
  branch("RunsUnitAlone", 3, true);

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
  poisoned("NanOnce", "has a NaN gradient once", true);
  poisoned("NanAlways", "has NaN gradients for two steps, and two are the limit", false);
}

void add_connections(Cases& cases) {
  cases.add("ControlLinkCut", "loses its control connection, then sleeps", Moment::kBegin, [](RankHere& here) {
    cut(AF_INET);
    hang(here);
  }).hangs = true;
  cases.add("ControlLinkCutOnly", "loses its control connection, and goes on", Moment::kBegin, [](RankHere&) { cut(AF_INET); });
  cases.add("DataLinkCut", "loses its connections to the others", Moment::kBegin, [](RankHere&) { cut(AF_UNIX); });
  cases.add("NoMemfd", "is refused memory by its kernel").failpoints = "system.memfd_create:errno=EMFILE";
}

}  // namespace

std::vector<FaultCase> fault_cases() {
  Cases cases;
  add_ends(cases);
  add_hangs(cases);
  add_calls(cases);
  add_steps(cases);
  add_models(cases);
  add_connections(cases);
  return cases.take();
}

}  // namespace zeroth::testing
