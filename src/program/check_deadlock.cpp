#include "program/checks.h"

#include <cstddef>
#include <deque>
#include <utility>

namespace zeroth {
namespace {

/// Runs every rank until it waits, again and again: how far the ranks come does not depend on the order of turns.
class Run {
 public:
  Run(const StepProgram& program, const Waits& waits)
      : program_(program), waits_(waits), next_(program.actions.size(), 0), waiters_(program.actions.size()) {}

  /// True if all come to their end.
  bool finishes() {
    std::deque<int> ready;
    for (int rank = 0; rank < program_.ranks(); ++rank) ready.push_back(rank);
    while (!ready.empty()) {
      const int rank = ready.front();
      ready.pop_front();
      if (!advance(rank)) continue;
      for (const int waiter : std::exchange(waiters_[static_cast<std::size_t>(rank)], {})) ready.push_back(waiter);
    }
    for (int rank = 0; rank < program_.ranks(); ++rank) {
      if (!at_end(rank)) return false;
    }
    return true;
  }
  [[nodiscard]] bool at_end(int rank) const {
    return next(rank) == static_cast<int>(program_.actions[static_cast<std::size_t>(rank)].size());
  }
  /// The action at which a rank waits.
  [[nodiscard]] int next(int rank) const { return next_[static_cast<std::size_t>(rank)]; }
  /// The first thing that it waits for there.
  [[nodiscard]] Site awaited(int rank) const {
    std::vector<Site> sites;
    waits_.of({.rank = rank, .index = next(rank)}, sites);
    for (const Site& site : sites) {
      if (next(site.rank) <= site.index) return site;
    }
    return {};
  }

 private:
  /// Whether the rank came further.
  bool advance(int rank) {
    const int before = next(rank);
    while (!at_end(rank)) {
      const Site site = awaited(rank);
      if (site.rank >= 0) {
        waiters_[static_cast<std::size_t>(site.rank)].push_back(rank);
        break;
      }
      ++next_[static_cast<std::size_t>(rank)];
    }
    return next(rank) != before;
  }

  const StepProgram& program_;
  const Waits& waits_;
  std::vector<int> next_;
  std::vector<std::vector<int>> waiters_;
};

}  // namespace

std::optional<Refutation> refute_deadlock(const StepProgram& program, const ActionIndex& index,
                                          const std::vector<Dependence>& dependences) {
  const Waits waits(program, index, dependences);
  Run run(program, waits);
  if (run.finishes()) return std::nullopt;
  int rank = 0;
  while (run.at_end(rank)) ++rank;
  // Every rank that waits does so for another that waits: after as many steps as there are ranks this is in the circle.
  for (int step = 0; step < program.ranks(); ++step) rank = run.awaited(rank).rank;
  const Site awaited = run.awaited(rank);
  std::string circle = "rank " + std::to_string(rank);
  for (int at = awaited.rank; at != rank; at = run.awaited(at).rank)
    circle += " waits for rank " + std::to_string(at) + ", which";
  circle += " waits for rank " + std::to_string(rank);
  return Refutation{
      .what = "ranks wait for each other: " + circle,
      .places = {place_of(program, rank, run.next(rank)), place_of(program, awaited.rank, run.next(awaited.rank))},
      .expected = place_of(program, awaited.rank, awaited.index).action + " on rank " + std::to_string(awaited.rank) +
                  " before it waits"};
}

}  // namespace zeroth
