// What the control plane costs by the number of ranks. The ranks are processes on this host that send each other
// nothing else.
//
//   all have joined        from the moment when all ask to be let in
//   hub, leaf              CPU of the process of rank 0, and of another one, of which nothing else runs: while all
//   compute, and while all wait for one rank a rank is killed       until half of the others, and all of them, have
//   thrown an error that names it
//
//   control_bench --ranks 8 128 1000 --rounds 5 --json out.json
#include "support/cpu_time.h"
#include "support/crowd.h"
#include "support/record.h"
#include "support/statistics.h"

#include <zeroth/base/error.h>
#include <zeroth/comm/control_plane.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::benchmarks {
namespace {

constexpr Milliseconds kPhase{3'000};
constexpr Milliseconds kTimeout{120'000};

double now_ms() {
  return std::chrono::duration<double, std::milli>(SteadyClock::now().time_since_epoch()).count();
}

double cpu_ms() {
  return 1e3 * cpu_seconds();
}

/// Which of a rank's notes.
enum Note : int { kAsked, kJoined, kQuietCpu, kWaitCpu, kThrown };

void run_rank(test::Crowd& crowd, int rank, int victim) {
  const int size = crowd.size();
  const auto activity = std::make_shared<RankActivity>(rank, size);
  const std::unique_ptr<CommBackend> group = crowd.group(rank);
  crowd.note(rank, kAsked) = now_ms();
  const std::unique_ptr<ControlPlane> control =
      ControlPlane::join(*group, activity, {.timeout = kTimeout, .silent_after = Milliseconds{60'000}});
  crowd.note(rank, kJoined) = now_ms();
  crowd.meet(rank, *activity, 0, kTimeout);
  double before = cpu_ms();
  std::this_thread::sleep_for(kPhase);
  crowd.note(rank, kQuietCpu) = cpu_ms() - before;
  crowd.meet(rank, *activity, 1, kTimeout);
  if (rank == victim) {
    while (!crowd.all_at(2, victim)) std::this_thread::sleep_for(Milliseconds{10});
    std::this_thread::sleep_for(kPhase + Milliseconds{1'000});
    crowd.note(rank, kThrown) = now_ms();
    ::kill(::getpid(), SIGKILL);
  }
  try {
    const std::jthread measure([&] {
      std::this_thread::sleep_for(Milliseconds{500});
      before = cpu_ms();
      std::this_thread::sleep_for(kPhase);
      crowd.note(rank, kWaitCpu) = cpu_ms() - before;
    });
    crowd.meet(rank, *activity, 2, kTimeout);
    throw std::runtime_error("the rank that is killed has come");
  } catch (const Error& error) {
    const bool named = error.message().find(fmt::format("rank {} (pid", victim)) != std::string::npos;
    crowd.note(rank, kThrown) = now_ms();
    if (error.code() != ErrorCode::kPeerLost || !named) throw;
  }
  // Nobody leaves before all have heard: that would be another ending.
  std::this_thread::sleep_for(Milliseconds{2'000});
}

void run_job(int size, std::vector<std::vector<double>>& samples) {
  test::Crowd crowd(size);
  const int victim = size / 2;
  std::vector<pid_t> pids;
  const pid_t parent = ::getpid();
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(2);
      try {
        run_rank(crowd, rank, victim);
      } catch (const std::exception& error) {
        std::cerr << fmt::format("rank {}: {}\n", rank, error.what());
        ::_exit(1);
      }
      ::_exit(0);
    }
    if (pid < 0) {
      for (const pid_t started : pids) ::kill(started, SIGKILL);
      throw std::runtime_error("fork failed");
    }
    pids.push_back(pid);
  }
  int failed = 0;
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    ::waitpid(pids[static_cast<std::size_t>(rank)], &status, 0);
    if (rank != victim && status != 0) ++failed;
  }
  if (failed > 0) throw std::runtime_error(fmt::format("{} of {} ranks have failed", failed, size));
  double asked = 0;
  double joined = 0;
  std::vector<double> thrown;
  for (int rank = 0; rank < size; ++rank) {
    asked = std::max(asked, crowd.note(rank, kAsked));
    joined = std::max(joined, crowd.note(rank, kJoined));
    if (rank != victim) thrown.push_back(crowd.note(rank, kThrown) - crowd.note(victim, kThrown));
  }
  const auto share = [&](Note note, int rank) {
    return 100 * crowd.note(rank, note) / static_cast<double>(kPhase.count());
  };
  const std::vector<double> found{joined - asked,
                                  share(kQuietCpu, 0),
                                  share(kQuietCpu, 1),
                                  share(kWaitCpu, 0),
                                  share(kWaitCpu, 1),
                                  median(thrown),
                                  *std::ranges::max_element(thrown)};
  samples.resize(found.size());
  for (std::size_t row = 0; row < found.size(); ++row) samples[row].push_back(found[row]);
}

}  // namespace
}  // namespace zeroth::benchmarks

int main(int argc, char** argv) {
  using namespace zeroth::benchmarks;
  CLI::App app("What the control plane costs by the number of ranks.", "control_bench");
  std::vector<int> sizes{8, 128, 1'000};
  int rounds = 5;
  std::string json;
  app.add_option("--ranks", sizes, "Processes")->check(CLI::Range(3, 4'096))->capture_default_str();
  app.add_option("--rounds", rounds, "Jobs of each size")->check(CLI::Range(1, 1'000))->capture_default_str();
  app.add_option("--json", json, "Also write the result there");
  CLI11_PARSE(app, argc, argv);
  Record record("comm/control", argc, argv);
  record.setting("ranks", sizes);
  record.setting("rounds", rounds);
  for (const int size : sizes) {
    std::vector<std::vector<double>> samples;
    for (int round = 0; round < rounds; ++round) run_job(size, samples);
    const auto add = [&](std::size_t row, const std::string& name, const std::string& unit) {
      record.add({.name = fmt::format("{} ranks: {}", size, name),
                  .unit = unit,
                  .summary = summarise(samples[row]),
                  .better = Better::kLower});
    };
    add(0, "all have joined", "ms");
    add(1, "hub while all compute", "% of a core");
    add(2, "leaf while all compute", "% of a core");
    add(3, "hub while all wait for one", "% of a core");
    add(4, "leaf while all wait for one", "% of a core");
    add(5, "a rank is killed, half have thrown", "ms");
    add(6, "a rank is killed, all have thrown", "ms");
  }
  std::cout << record.table();
  record.write(json);
  return 0;
}
