#include "program/checks.h"
#include "program/costs.h"

#include <zeroth/base/error.h>
#include <zeroth/program/simulate.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <utility>

namespace zeroth {
namespace {

/// Things that run beside the computations of a rank, each kind after the last of its kind.
enum class Lane : std::size_t { kGather, kReduce, kCopy };

struct Clock {
  double now = 0;
  std::array<double, 3> lanes{};
  std::map<int, double> whole{};                    ///< when the parameters of a chunk are there
  std::map<std::pair<int, int>, double> fetched{};  ///< when the activations of (chunk, micro-batch) are back
  double first = -1;
  double last = 0;
};

class Simulator {
 public:
  Simulator(const StepProgram& program, const Costs& costs)
      : program_(program),
        costs_(costs),
        index_(program),
        waits_(program, index_, costs.dependences),
        clocks_(program.actions.size()),
        result_{.ranks = std::vector<RankTimes>(program.actions.size())},
        waiters_(program.actions.size()) {
    for (const std::vector<Action>& actions : program.actions) {
      std::vector<int>& steps = steps_.emplace_back();
      for (std::size_t place = 0; place < actions.size(); ++place)
        if (actions[place].kind == ActionKind::kStep) steps.push_back(static_cast<int>(place));
    }
  }

  Simulation run() {
    std::deque<int> ready;
    for (int rank = 0; rank < program_.ranks(); ++rank) ready.push_back(rank);
    while (!ready.empty()) {
      const int rank = ready.front();
      ready.pop_front();
      if (!advance(rank)) continue;
      for (const int waiter : std::exchange(waiters_[at(rank)], {})) ready.push_back(waiter);
    }
    if (!program_.inexact) step_together();
    finish();
    return std::move(result_);
  }

 private:
  static std::size_t at(int place) { return static_cast<std::size_t>(place); }
  [[nodiscard]] const std::vector<Action>& list(int rank) const { return program_.actions[at(rank)]; }
  [[nodiscard]] int next(int rank) const { return static_cast<int>(result_.ranks[at(rank)].actions.size()); }

  /// Whether the rank came further. It stops where it waits for an action of another rank, and at the common step.
  bool advance(int rank) {
    const int before = next(rank);
    std::vector<Site> sites;
    while (next(rank) < static_cast<int>(list(rank).size())) {
      const Action& action = list(rank)[at(next(rank))];
      if (action.kind == ActionKind::kStep && !program_.inexact) break;
      waits_.of({.rank = rank, .index = next(rank)}, sites);
      if (action.kind == ActionKind::kStep && costs_.steps_meet) meet_at_step(rank, sites);
      const auto missing = std::ranges::find_if(sites, [&](const Site& site) { return next(site.rank) <= site.index; });
      if (missing != sites.end()) {
        waiters_[at(missing->rank)].push_back(rank);
        break;
      }
      run_action(rank, action, ready_at(sites));
    }
    return next(rank) != before;
  }

  /// All that comes before this STEP on other ranks.
  void meet_at_step(int rank, std::vector<Site>& sites) const {
    const auto number = std::ranges::find(steps_[at(rank)], next(rank)) - steps_[at(rank)].begin();
    for (int other = 0; other < program_.ranks(); ++other) {
      const std::vector<int>& steps = steps_[at(other)];
      const bool has_it = std::cmp_less(number, steps.size());
      if (other == rank || !has_it) continue;
      if (const int place = steps[static_cast<std::size_t>(number)]; place > 0)
        sites.push_back({.rank = other, .index = place - 1});
    }
  }

  /// When everything that was waited for is over.
  double ready_at(const std::vector<Site>& sites) const {
    double time = 0;
    for (const Site& site : sites) {
      const TimedAction& other = result_.ranks[at(site.rank)].actions[at(site.index)];
      const auto arrival = arrivals_.find({site.rank, site.index});
      double end = arrival == arrivals_.end() ? other.end : arrival->second;
      if (is_vocabulary(other.action.kind)) end += costs_.collective;
      time = std::max(time, end);
    }
    return time;
  }

  void run_action(int rank, const Action& action, double ready) {
    Clock& clock = clocks_[at(rank)];
    double begin = clock.now;
    double end = begin;
    const double duration = duration_of(costs_, rank, action);
    if (is_send(action.kind)) {
      arrivals_[{rank, next(rank)}] = send(stream_of(program_, action), action, begin);
    } else if (is_message(action.kind)) {
      end = clock.now = std::max(clock.now, ready);
    } else if (const auto lane = lane_of(action.kind)) {
      double& free = clock.lanes[static_cast<std::size_t>(*lane)];
      begin = std::max(free, clock.now);
      end = free = begin + duration;
      note(clock, action, end);
    } else {
      if (action.kind == ActionKind::kStep) ready = std::max(ready, std::ranges::max(clock.lanes));
      begin = std::max({clock.now, ready, needed_at(clock, action)});
      end = clock.now = begin + duration;
      if (duration_counts(action.kind)) {
        if (clock.first < 0) clock.first = begin;
        clock.last = end;
        result_.ranks[at(rank)].busy += duration;
      }
    }
    result_.ranks[at(rank)].actions.push_back({.action = action, .begin = begin, .end = end});
    add_live_changes(index_, costs_, action, begin, end, result_.ranks[at(rank)].live);
  }

  static bool duration_counts(ActionKind kind) {
    return is_computation(kind) || kind == ActionKind::kRecompute || kind == ActionKind::kVocabScores ||
           kind == ActionKind::kVocabGradients;
  }
  static std::optional<Lane> lane_of(ActionKind kind) {
    if (kind == ActionKind::kUnshard) return Lane::kGather;
    if (kind == ActionKind::kReduce) return Lane::kReduce;
    if (kind == ActionKind::kFetch || kind == ActionKind::kFlush) return Lane::kCopy;
    return std::nullopt;
  }
  static void note(Clock& clock, const Action& action, double end) {
    if (action.kind == ActionKind::kUnshard) clock.whole[action.chunk] = end;
    if (action.kind == ActionKind::kFetch) clock.fetched[{action.chunk, action.micro_batch}] = end;
  }
  /// When the parameters and activations of a computation are there.
  static double needed_at(const Clock& clock, const Action& action) {
    if (action.chunk < 0) return 0;
    const auto whole = clock.whole.find(action.chunk);
    const auto fetched = clock.fetched.find({action.chunk, action.micro_batch});
    return std::max(whole == clock.whole.end() ? 0.0 : whole->second,
                    fetched == clock.fetched.end() ? 0.0 : fetched->second);
  }

  /// When the message is there.
  double send(const Stream& stream, const Action& action, double now) {
    const std::pair pair{stream.from, stream.to};
    const auto unlike = costs_.links.find(pair);
    const LinkCosts& link = unlike == costs_.links.end() ? costs_.link : unlike->second;
    const std::int64_t bytes =
        costs_.of(action.kind == ActionKind::kSendForward ? action.chunk : action.chunk - 1).output_bytes;
    const double occupied = link.bytes_per_second > 0 ? static_cast<double>(bytes) / link.bytes_per_second : 0;
    auto& [use, free] = links_[pair];
    free = std::max(free, now) + occupied;
    ++use.messages;
    use.bytes += bytes;
    use.busy += occupied;
    return free + link.latency;
  }

  /// All ranks that have a step stand before it.
  void step_together() {
    double time = 0;
    for (int rank = 0; rank < program_.ranks(); ++rank) {
      if (next(rank) == static_cast<int>(list(rank).size())) continue;
      const Action& action = list(rank)[at(next(rank))];
      ZR_ASSERT(action.kind == ActionKind::kStep, "a rank of a verified program waits");
      time = std::max({time, clocks_[at(rank)].now, std::ranges::max(clocks_[at(rank)].lanes)});
    }
    for (int rank = 0; rank < program_.ranks(); ++rank) {
      while (next(rank) < static_cast<int>(list(rank).size())) {
        Clock& clock = clocks_[at(rank)];
        clock.now = std::max(clock.now, time);
        run_action(rank, list(rank)[at(next(rank))], 0);
      }
    }
  }

  void finish() {
    for (int rank = 0; rank < program_.ranks(); ++rank) {
      ZR_CHECK(!costs_.steps_meet || next(rank) == static_cast<int>(list(rank).size()), ErrorCode::kUsage,
               "ranks wait for each other where they meet for each step",
               {.where = "program.simulate",
                .who = "rank " + std::to_string(rank),
                .which = program_.schedule,
                .expected = "messages that cross no STEP"});
      ZR_ASSERT(next(rank) == static_cast<int>(list(rank).size()), "a rank of a verified program waits");
      RankTimes& times = result_.ranks[at(rank)];
      const Clock& clock = clocks_[at(rank)];
      if (clock.first >= 0) times.bubble = clock.last - clock.first - times.busy;
      result_.bubble = std::max(result_.bubble, times.bubble);
      for (const TimedAction& action : times.actions) result_.step_time = std::max(result_.step_time, action.end);
      add_up_live(times);
    }
    for (auto& [pair, link] : links_) {
      link.first.from = pair.first;
      link.first.to = pair.second;
      result_.links.push_back(link.first);
    }
  }

  const StepProgram& program_;
  const Costs& costs_;
  ActionIndex index_;
  Waits waits_;
  std::vector<Clock> clocks_;
  Simulation result_;
  std::vector<std::vector<int>> waiters_;
  std::vector<std::vector<int>> steps_;                                // places of STEP, by rank
  std::map<std::pair<int, int>, double> arrivals_{};                   // of sends, by (rank, index)
  std::map<std::pair<int, int>, std::pair<LinkUse, double>> links_{};  // and when the link is free
};

}  // namespace

double Simulation::bubble_of_ideal() const {
  double busy = 0;
  for (const RankTimes& rank : ranks) busy = std::max(busy, rank.busy);
  return busy > 0 ? bubble / busy : 0;
}

Simulation simulate(const StepProgram& program, const Costs& costs) {
  ZR_CHECK(program.late.empty(), ErrorCode::kUsage, "gradients come steps later, and this is one step",
           {.where = "program.simulate",
            .which = program.schedule,
            .expected = "several steps one after the other",
            .hint = "unrolled() puts them there"});
  VerifyOptions options{.forwards_only = true, .dependences = costs.dependences};
  for (const std::vector<Action>& actions : program.actions) {
    for (const Action& action : actions) options.forwards_only = options.forwards_only && !is_backward(action.kind);
  }
  if (const auto refutation = refute(program, options)) throw_refutation(program, *refutation, "simulate");
  require_costs(program, costs);
  return Simulator(program, costs).run();
}

}  // namespace zeroth
