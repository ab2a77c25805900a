// What the flight recorder, the watch over waits and the control plane cost while nothing is wrong.
//
// Two ranks (threads) make calls of 4 KiB in blocks, in turn through a backend as it is and through one that is
// recorded and watched; a round gives one difference. Beside it the parts alone: a record of the recorder, and an event
// of the engine.
//
//   watch_bench --rounds 41 --json out.json
#include "support/record.h"
#include "support/statistics.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/comm/control_plane.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/comm/factory.h>

#include <CLI/CLI.hpp>

#include <chrono>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::benchmarks {
namespace {

constexpr int kCalls = 2'000;
constexpr std::size_t kFloats = 1'024;

double ns_each(int count, const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / count;
}

struct Times {
  std::vector<double> plain, watched, difference;
};

/// Rank 0's times a call.
Times time_calls(int rounds) {
  constexpr int kRanks = 2;
  const auto plain_hub = make_inproc_hub(kRanks);
  const auto watched_hub = make_inproc_hub(kRanks);
  Times times;
  const auto run = [&](int rank) {
    const auto activity = std::make_shared<RankActivity>(rank, kRanks);
    CommOptions options;
    const std::shared_ptr<CommBackend> plain =
        make_backend("inproc", {.rank = rank, .size = kRanks, .hub = plain_hub, .options = options});
    options.activity = activity;
    std::unique_ptr<CommBackend> base =
        make_backend("inproc", {.rank = rank, .size = kRanks, .hub = watched_hub, .options = options});
    const std::shared_ptr<ControlPlane> control = ControlPlane::join(*base, activity, {});
    const auto watched = std::make_shared<RecordingBackend>(std::move(base), activity, control);
    const std::vector<float> part(kFloats / kRanks, 1.0F);
    std::vector<float> data(kFloats);
    const auto block = [&](const std::shared_ptr<CommBackend>& group) {
      const Communicator ranks(group);
      return ns_each(kCalls, [&] {
        for (int call = 0; call < kCalls; ++call) ranks.all_gather(std::span(part), std::span(data));
      });
    };
    (void)block(plain);
    (void)block(watched);
    for (int round = 0; round < rounds; ++round) {
      const bool first = round % 2 == 0;
      const double one = block(first ? plain : std::shared_ptr<CommBackend>(watched));
      const double other = block(first ? std::shared_ptr<CommBackend>(watched) : plain);
      if (rank != 0) continue;
      times.plain.push_back(first ? one : other);
      times.watched.push_back(first ? other : one);
      times.difference.push_back(times.watched.back() - times.plain.back());
    }
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  return times;
}

void run(int rounds, Record& record) {
  const Times calls = time_calls(rounds);
  std::vector<double> records;
  std::vector<double> events;
  std::vector<double> waits;
  RankActivity activity(0, 1);
  const auto group_activity = std::make_shared<RankActivity>(0, 1);
  RecordingBackend group(make_backend("self", {}), group_activity);
  const WaitContext context{.what = "a bucket slot held by unit blocks.2"};
  FlightRecorder& recorder = activity.recorder();
  constexpr int kEvents = 100'000;
  for (int round = 0; round < rounds; ++round) {
    records.push_back(ns_each(kEvents, [&] {
      for (int event = 0; event < kEvents; ++event)
        recorder.end(recorder.begin({.sequence = static_cast<std::uint64_t>(event)}));
    }));
    waits.push_back(ns_each(kEvents, [&] {
      for (int event = 0; event < kEvents; ++event) group.wait_until([] { return true; }, context);
    }));
    events.push_back(ns_each(kEvents, [&] {
      for (int event = 0; event < kEvents; ++event) activity.enter(Phase::kForward, 0, event);
    }));
  }
  record.add({.name = "all_gather 4 KiB, 2 ranks, as it is",
              .unit = "ns",
              .summary = summarise(calls.plain),
              .better = Better::kLower});
  record.add({.name = "all_gather 4 KiB, 2 ranks, recorded and watched",
              .unit = "ns",
              .summary = summarise(calls.watched),
              .better = Better::kLower});
  record.add({.name = "difference a call",
              .unit = "ns",
              .summary = summarise(calls.difference),
              .better = Better::kLower,
              .bar = 1'000});
  record.add(
      {.name = "record of the flight recorder", .unit = "ns", .summary = summarise(records), .better = Better::kLower});
  record.add({.name = "one-sided wait that need not wait, recorded",
              .unit = "ns",
              .summary = summarise(waits),
              .better = Better::kLower,
              .bar = 1'000});
  record.add({.name = "event of the engine", .unit = "ns", .summary = summarise(events), .better = Better::kLower});
}

}  // namespace
}  // namespace zeroth::benchmarks

int main(int argc, char** argv) {
  CLI::App app("What is always on, while nothing is wrong.", "watch_bench");
  int rounds = 41;
  std::string json;
  app.add_option("--rounds", rounds, "Rounds")->check(CLI::Range(3, 10'000))->capture_default_str();
  app.add_option("--json", json, "Also write the result there");
  CLI11_PARSE(app, argc, argv);
  zeroth::benchmarks::Record record("comm/watch", argc, argv);
  record.setting("rounds", rounds);
  zeroth::benchmarks::run(rounds, record);
  std::cout << record.table();
  record.write(json);
  return 0;
}
