#include "process/attribution.h"

#include "process/fault_cases.h"
#include "support/fork_ranks.h"
#include "support/socket_transport.h"
#include "support/watched_job.h"

#include <zeroth/base/failpoint.h>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <functional>
#include <optional>
#include <random>
#include <regex>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

constexpr double kBoundSeconds = 15;
constexpr Milliseconds kHangs{30'000};
constexpr Milliseconds kShortTimeout{1'500};

enum class Kind : std::uint8_t {
  kKill,
  kExit,
  kLeave,
  kThrow,
  kAbort,
  kFreeze,
  kSleep,
  kSpin,
  kFailpointKill,
  kFailpointThrow,
  kSkipLoss,
  kSkipCounts,
  kSwapSums,
  kOtherSize,
  kSkipStep,
  kSkipBackward,
  kStepTwice,
  kAverage,
  kBarrier,
  kDiscard,
  kOtherRate,
  kNan,
  kOtherWidth,
  kOtherConfiguration,
};
constexpr std::array kKindNames{"is killed",
                                "calls _exit(3)",
                                "leaves",
                                "throws",
                                "stops the job",
                                "is stopped (SIGSTOP)",
                                "sleeps",
                                "spins",
                                "is killed at a failpoint",
                                "throws at a failpoint",
                                "skips its small sum",
                                "skips its large sum",
                                "swaps two sums",
                                "sums another size",
                                "skips a step()",
                                "skips a backward",
                                "steps twice",
                                "averages alone",
                                "calls a stray barrier()",
                                "discards its gradients",
                                "sets another rate",
                                "has NaN gradients",
                                "builds another width",
                                "has another configuration"};
constexpr std::array kMoments{Moment::kBegin, Moment::kForward, Moment::kBackward, Moment::kTrained, Moment::kStepped};
constexpr std::array kMomentNames{"at the beginning", "in the forward", "in the backward", "after the backward",
                                  "after step()"};
constexpr std::array kUnits{"root", "blocks.0", "blocks.1", "blocks.2"};
/// A rank comes by them once a step or oftener, at every stage.
constexpr std::array<std::string_view, 4> kSites{"engine.vote", "engine.update", "engine.publish", "engine.committed"};
constexpr std::array<std::string_view, 3> kMemorySites{"shm.all_reduce.post", "shm.all_reduce.mid",
                                                       "shm.all_reduce.end"};
constexpr std::array<std::string_view, 4> kMessageSites{"messages.all_reduce.post", "messages.all_reduce.mid",
                                                        "messages.all_reduce.end", "messages.send"};

struct Plot {
  std::uint64_t seed = 0;
  int world = 2;
  int guilty = 0;
  int zero_stage = 0;
  Over over = Over::kMemory;
  Kind kind = Kind::kKill;
  int step = 1;
  std::size_t moment = 0;
  int unit = 0;
  std::string site{};

  [[nodiscard]] bool at_a_moment() const {
    return kind == Kind::kKill || kind == Kind::kExit || kind == Kind::kThrow || kind == Kind::kAbort || hangs();
  }
  [[nodiscard]] bool hangs() const { return kind == Kind::kFreeze || kind == Kind::kSleep || kind == Kind::kSpin; }
  [[nodiscard]] bool in_a_unit() const {
    return kMoments[moment] == Moment::kForward || kMoments[moment] == Moment::kBackward;
  }
};

Plot plot_of(std::uint64_t seed) {
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15U + 1);
  const auto draw = [&](std::uint64_t below) { return static_cast<int>((random() >> 16U) % below); };
  Plot plot{.seed = seed};
  plot.kind = static_cast<Kind>(seed % kKindNames.size());  // all kinds alike
  plot.world = 2 + draw(3);
  plot.guilty = draw(static_cast<std::uint64_t>(plot.world));
  plot.zero_stage = draw(4);
  plot.over = draw(2) == 0 ? Over::kMemory : Over::kMessages;
  plot.step = 1 + draw(4);
  plot.moment = static_cast<std::size_t>(draw(kMoments.size()));
  plot.unit = draw(kUnits.size());
  if (plot.kind == Kind::kFailpointKill || plot.kind == Kind::kFailpointThrow) {
    const bool memory = plot.over == Over::kMemory;
    const bool common = draw(2) == 0;
    plot.site = common   ? kSites[static_cast<std::size_t>(draw(kSites.size()))]
                : memory ? kMemorySites[static_cast<std::size_t>(draw(kMemorySites.size()))]
                         : kMessageSites[static_cast<std::size_t>(draw(kMessageSites.size()))];
  }
  return plot;
}

/// How often the guilty rank comes by the site before it strikes: three sums a step, one commit vote, many messages.
int hit_of(const Plot& plot) {
  if (plot.site.starts_with("engine.")) return plot.step + 1;
  return plot.site == "messages.send" ? 40 + 8 * plot.step : 3 * plot.step + 1 + static_cast<int>(plot.seed % 3);
}

void commit(const Plot& plot, RankHere& here) {
  switch (plot.kind) {
    case Kind::kKill:
      ::raise(SIGKILL);
      return;
    case Kind::kExit:
      ::_exit(3);
    case Kind::kThrow:
      throw std::runtime_error("planted 4711");
    case Kind::kAbort:
      throw Error(ErrorCode::kModel, "planted 4711");
    case Kind::kFreeze:
      ::raise(SIGSTOP);
      return;
    case Kind::kSleep:
      for (;;) std::this_thread::sleep_for(Milliseconds{1'000});
    case Kind::kSpin:
      for (volatile bool always = true; always;) {
      }
      return;
    case Kind::kLeave:
      here.turn.leaves = true;
      return;
    case Kind::kSkipLoss:
      here.turn.loss = false;
      return;
    case Kind::kSkipCounts:
      here.turn.counts = false;
      return;
    case Kind::kSwapSums:
      here.turn.loss = here.turn.counts = false;
      sum_counts(here.own);
      sum_loss(here.own);
      return;
    case Kind::kOtherSize:
      here.turn.counts = false;
      sum_loss(here.own);
      here.turn.loss = false;
      sum_counts(here.own, kManyCounts - 1);
      return;
    case Kind::kSkipStep:
      here.turn.step = false;
      return;
    case Kind::kSkipBackward:
      here.turn.backward = false;
      return;
    case Kind::kStepTwice:
      (void)here.engine.step();
      return;
    case Kind::kAverage:
      (void)here.engine.average(1.0);
      return;
    case Kind::kBarrier:
      here.engine.barrier();
      return;
    case Kind::kDiscard:
      here.turn.step = false;
      here.engine.discard_gradients();
      return;
    case Kind::kOtherRate:
      here.engine.set_group(1, GroupHyper{.lr = 0.5});
      return;
    default:
      return;
  }
}

/// When what is not at_a_moment() happens.
Moment moment_of(Kind kind) {
  switch (kind) {
    case Kind::kSwapSums:
    case Kind::kOtherSize:
    case Kind::kStepTwice:
      return Moment::kStepped;
    case Kind::kDiscard:
      return Moment::kTrained;
    default:
      return Moment::kBegin;
  }
}

/// Innocent ranks are not all equally fast.
void make_noise(std::mt19937_64& random) {
  if (random() % 8 != 0) return;
  const auto time = std::chrono::microseconds(random() % 30'000);
  if (random() % 3 != 0) return std::this_thread::sleep_for(time);
  const auto end = SteadyClock::now() + time / 3;
  while (SteadyClock::now() < end) {
  }
}

WatchedJob job_of(const Plot& plot, Times& times) {
  WatchedJob job{.world = plot.world, .zero_stage = plot.zero_stage, .max_nonfinite_steps = 2};
  const bool patient = plot.kind == Kind::kSleep || plot.kind == Kind::kSpin;
  job.options.timeout = job.options.first_timeout = patient ? kShortTimeout : Milliseconds{60'000};
  job.options.frozen_after = Milliseconds{1'500};
  job.happen = [plot, &times, random = std::mt19937_64(plot.seed)](RankHere& here, Moment moment, int unit) mutable {
    if (here.world.rank() != plot.guilty) {
      random.discard(static_cast<unsigned>(here.world.rank()));
      return make_noise(random);
    }
    const Moment when = plot.at_a_moment() ? kMoments[plot.moment] : moment_of(plot.kind);
    if (here.step != plot.step || moment != when) return;
    if (plot.at_a_moment() && plot.in_a_unit() && unit != plot.unit) return;
    times.strike();
    commit(plot, here);
  };
  if (plot.kind == Kind::kNan) {
    job.poison = [plot, &times](int rank, std::int64_t step, int, int param) {
      if (rank != plot.guilty || step < plot.step || param != 3 + 2 * (plot.unit % 3))
        return false;  // a block's weight
      times.strike();
      return true;
    };
  }
  if (plot.kind == Kind::kOtherWidth || plot.kind == Kind::kOtherConfiguration) {
    job.tamper = [plot, &times](int rank, ToyOptions& model, EngineSettings& settings) {
      if (rank != plot.guilty) return;
      times.strike();
      plot.kind == Kind::kOtherWidth ? void(model.width = 14)
                                     : void(settings.configuration = R"({"train_batch_size":16})");
    };
  }
  return job;
}

/// The error of an innocent rank: its code, and regular expressions that it must hold.
Told told_of(const Plot& plot) {
  const std::string guilty = "rank " + std::to_string(plot.guilty);
  const std::string named = guilty + R"(( \(pid [^)]*\))? )";
  const std::string steps = std::to_string(plot.step);
  const std::string next = std::to_string(plot.step + 1);
  const bool memory = plot.over == Over::kMemory;
  switch (plot.kind) {
    case Kind::kKill:
    case Kind::kFailpointKill:
      return {ErrorCode::kPeerLost, {named + "was killed by SIGKILL"}};
    case Kind::kExit:
      return {ErrorCode::kPeerLost, {named + "exited with code 3"}};
    case Kind::kLeave:
      return {ErrorCode::kPeerLost,
              {named + R"(left early: it ended after \d+ steps?, while .*: unequal batch counts\?)"}};
    case Kind::kThrow:
      return {ErrorCode::kAborted, {guilty + R"( stopped the job: \[USER\] planted 4711)"}};
    case Kind::kAbort:
      return {ErrorCode::kAborted, {guilty + R"( stopped the job: \[MODEL\] planted 4711)"}};
    case Kind::kFailpointThrow:
      return {ErrorCode::kAborted, {guilty + R"( stopped the job: \[INTERNAL\] planted failure at )" + plot.site}};
    case Kind::kFreeze:
      return {ErrorCode::kPeerLost, {named + "(is frozen: no heartbeat|has given no sign of life)"}};
    case Kind::kSleep:
    case Kind::kSpin: {
      const std::string unit = kUnits[static_cast<std::size_t>(plot.unit)];
      const std::array<std::string, kMoments.size()> doing{
          "is between steps, after step " + steps, "is in the forward of unit " + unit + " of step " + next,
          "is in the backward of unit " + unit + " of step " + next, "has ended the backward of step " + next,
          "is between steps, after step " + next};
      return {ErrorCode::kTimeout, {R"(no answer within 1\.5 s: )" + named + doing[plot.moment]}};
    }
    case Kind::kSkipLoss:
      return {ErrorCode::kMismatch, {"the token counts on " + guilty}};
    case Kind::kSkipCounts:
      return {ErrorCode::kMismatch, {guilty + " waits for ", "the token counts"}};
    case Kind::kSwapSums:
      return {ErrorCode::kMismatch, {"the token counts on " + guilty, "the loss metrics on rank"}};
    case Kind::kOtherSize:
      return {ErrorCode::kMismatch, {"the token counts on " + guilty, R"(19999 elements .*\()" + guilty + R"(\))"}};
    case Kind::kSkipStep:
      return {ErrorCode::kMismatch, {guilty + " waits for .*the loss metrics", R"(wait.* for .*step\(\))"}};
    case Kind::kSkipBackward:
      if (memory) return {ErrorCode::kUsage, {R"(step\(\) without a backward)", "who: " + guilty + "/"}, true};
      return {ErrorCode::kMismatch, {R"(step\(\) on )" + guilty}};
    case Kind::kStepTwice:
      return {ErrorCode::kMismatch, {guilty + R"( waits for .*step\(\))", "the loss metrics"}};
    case Kind::kAverage:
      return {ErrorCode::kMismatch, {R"((average\(\) on )" + guilty + "|" + guilty + R"( waits for average\(\)))"}};
    case Kind::kBarrier:
      return {ErrorCode::kMismatch, {R"((barrier\(\) on )" + guilty + "|" + guilty + R"( waits for barrier\(\)))"}};
    case Kind::kDiscard:
      return {ErrorCode::kMismatch, {R"(zero_grad\(\) on )" + guilty + "/"}};
    case Kind::kOtherRate:
      return {ErrorCode::kMismatch, {"lr of parameter group 1", R"(0\.5 \()" + guilty + R"(\))"}};
    case Kind::kNan:
      return {ErrorCode::kNonFinite,
              {R"(parameter blocks\.)" + std::to_string(plot.unit % 3) + R"(\.weight, )" + guilty},
              true};
    case Kind::kOtherWidth:
      return {ErrorCode::kMismatch, {R"(in\.weight float32 \[14, 5\] .*\()" + guilty + R"(\))"}};
    case Kind::kOtherConfiguration:
      return {ErrorCode::kMismatch, {"/train_batch_size: ", guilty}};
  }
  return {};
}

/// Of three ranks and more the odd one is to blame, not rank 0's opposite.
bool blames_one(Kind kind) {
  return kind == Kind::kOtherRate || kind == Kind::kOtherWidth || kind == Kind::kOtherConfiguration;
}

bool is_over(pid_t pid) {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == pid;
}

ForkReport run(const Plot& plot, Times& times) {
  const WatchedJob job = job_of(plot, times);
  std::optional<SocketMesh> mesh;
  if (plot.over == Over::kMessages) mesh.emplace(plot.world);
  const std::string name = unique_job();
  ForkRanksOptions options{.deadline = kHangs};
  options.meanwhile = [&](const std::vector<pid_t>& pids, Milliseconds) {
    if (mesh) mesh->close_all();
    if (!plot.hangs()) return false;
    for (int rank = 0; rank < plot.world; ++rank) {
      if (rank != plot.guilty && !is_over(pids[static_cast<std::size_t>(rank)])) return true;
    }
    ::kill(pids[static_cast<std::size_t>(plot.guilty)], SIGKILL);
    return false;
  };
  const auto live = [&](int rank) {
    if (rank == plot.guilty && !plot.site.empty()) {
      const char* const action = plot.kind == Kind::kFailpointKill ? "kill" : "throw";
      arm_failpoints(parse_failpoints(plot.site + "@hit=" + std::to_string(hit_of(plot)) + ":" + action), rank);
      times.strike();
    }
    try {
      run_watched_rank(job, mesh ? World::from_transport(mesh->transport(rank), "the test")
                                 : shared_memory_world(name, rank, plot.world));
    } catch (...) {
      times.end(rank);
      throw;
    }
    times.end(rank);
  };
  return fork_ranks(plot.world, live, options);
}

}  // namespace

std::string describe_seed(std::uint64_t seed) {
  const Plot plot = plot_of(seed);
  std::string text = "seed " + std::to_string(seed) + ": rank " + std::to_string(plot.guilty) + " of " +
                     std::to_string(plot.world) + " " + kKindNames[static_cast<std::size_t>(plot.kind)];
  if (plot.at_a_moment()) {
    text += std::string(" ") + kMomentNames[plot.moment];
    if (plot.in_a_unit()) text += std::string(" of ") + kUnits[static_cast<std::size_t>(plot.unit)];
  }
  if (!plot.site.empty()) text += " " + plot.site + ", time " + std::to_string(hit_of(plot));
  return text + " in step " + std::to_string(plot.step + 1) + ", stage " + std::to_string(plot.zero_stage) + " over " +
         (plot.over == Over::kMemory ? "shared memory" : "messages");
}

std::string misattribution(std::uint64_t seed) {
  const Plot plot = plot_of(seed);
  Times times;
  const ForkReport report = run(plot, times);
  const Told told = told_of(plot);
  std::string wrong;
  const auto blame = [&](int rank, const std::string& what) {
    wrong += "  rank " + std::to_string(rank) + " " + what + "\n";
  };
  if (!times.has_struck()) wrong += "  nothing has happened\n";
  for (int rank = 0; rank < plot.world; ++rank) {
    if (rank == plot.guilty) continue;
    if (report.ends[static_cast<std::size_t>(rank)].killed_at_deadline) blame(rank, "hangs");
    if (times.seconds(rank).value_or(0) > kBoundSeconds) blame(rank, "is too slow");
    const RankFailure* failure = report.of(rank);
    if (failure == nullptr) {
      blame(rank, "ended well");
      continue;
    }
    if (failure->code != told.code && !(told.or_aborted && failure->code == ErrorCode::kAborted))
      blame(rank, "has another code than " + std::string(slug(told.code)));
    std::vector<std::string> words = told.words;
    if (plot.world > 2 && blames_one(plot.kind)) words.push_back("who: rank " + std::to_string(plot.guilty) + "/");
    for (const std::string& word : words) {
      if (!std::regex_search(failure->text, std::regex(word))) blame(rank, "does not say \"" + word + "\"");
    }
  }
  return wrong.empty() ? "" : describe_seed(seed) + "\n" + wrong + report.text();
}

}  // namespace zeroth::test
