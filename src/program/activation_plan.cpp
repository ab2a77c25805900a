#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/program/activation_plan.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

namespace zeroth {
namespace {

constexpr const char* kPlanner = "program.activation_plan";
constexpr std::size_t kMostStates = 10'000;  // of choices that no other beats; more are thinned out
constexpr std::uint64_t kGrid = 64;          // along bytes in memory, and along moved bytes

constexpr std::array kChoices{ActivationChoice::kKeep, ActivationChoice::kRecompute, ActivationChoice::kMove,
                              ActivationChoice::kRecomputeAndMove};

bool recomputes(ActivationChoice choice) {
  return choice == ActivationChoice::kRecompute || choice == ActivationChoice::kRecomputeAndMove;
}
bool moves(ActivationChoice choice) {
  return choice == ActivationChoice::kMove || choice == ActivationChoice::kRecomputeAndMove;
}
std::uint64_t bytes_of(const ActivationUnit& unit, ActivationChoice choice) {
  return recomputes(choice) ? unit.input_bytes : unit.saved_bytes;
}

/// Choices for the first units: their sums, and the way there.
struct Partial {
  std::uint64_t resident = 0;
  std::uint64_t moved = 0;
  double recompute = 0.0;
  int before = -1;  // index among the partials of one unit less
  ActivationChoice choice = ActivationChoice::kKeep;
};

/// Leaves those that no other beats or equals in all three sums.
std::vector<Partial> unbeaten(std::vector<Partial> all) {
  std::ranges::stable_sort(all, [](const Partial& a, const Partial& b) {
    return std::tie(a.resident, a.moved, a.recompute) < std::tie(b.resident, b.moved, b.recompute);
  });
  std::vector<Partial> kept;
  std::map<std::uint64_t, double> least;  // moved -> recompute; falls with rising moved
  for (const Partial& one : all) {
    auto after = least.upper_bound(one.moved);
    if (after != least.begin() && std::prev(after)->second <= one.recompute) continue;
    while (after != least.end() && after->second >= one.recompute) after = least.erase(after);
    least[one.moved] = one.recompute;
    kept.push_back(one);
  }
  return kept;
}

/// One of those that are nearly alike in bytes: the one with the least recompute. The first has the fewest bytes in
/// memory, and stays.
std::vector<Partial> thinned(const std::vector<Partial>& all) {
  const std::uint64_t resident = std::ranges::max(all, {}, &Partial::resident).resident / kGrid + 1;
  const std::uint64_t moved = std::ranges::max(all, {}, &Partial::moved).moved / kGrid + 1;
  std::map<std::pair<std::uint64_t, std::uint64_t>, Partial> best;
  for (const Partial& one : all) {
    const auto [place, fresh] = best.try_emplace({one.resident / resident, one.moved / moved}, one);
    if (!fresh && one.recompute < place->second.recompute) place->second = one;
  }
  std::vector<Partial> kept{all.front()};
  for (const auto& [key, one] : best) kept.push_back(one);
  return unbeaten(std::move(kept));
}

void require_numbers(std::span<const ActivationUnit> units, const ActivationTier& tier) {
  const auto good = [](double value) { return std::isfinite(value) && value >= 0.0; };
  ZR_CHECK(good(tier.write_bytes_per_s) && good(tier.read_bytes_per_s), ErrorCode::kUsage,
           "the bandwidth of a tier is no number of bytes per second", {.where = kPlanner, .expected = "0 or more"});
  for (const ActivationUnit& unit : units) {
    ZR_CHECK(good(unit.forward_s) && good(unit.backward_s) && good(unit.recompute_s), ErrorCode::kUsage,
             "a unit has times that are no seconds", {.where = kPlanner, .which = unit.name, .expected = "0 or more"});
  }
}

std::uint64_t least_resident(std::span<const ActivationUnit> units, bool can_move) {
  std::uint64_t least = 0;
  for (const ActivationUnit& unit : units) {
    if (!can_move) least += std::min(unit.saved_bytes, unit.input_bytes);
  }
  return least;
}

}  // namespace

std::string_view name_of(ActivationChoice choice) noexcept {
  switch (choice) {
    case ActivationChoice::kKeep:
      return "keep";
    case ActivationChoice::kRecompute:
      return "recompute";
    case ActivationChoice::kMove:
      return "move";
    case ActivationChoice::kRecomputeAndMove:
      return "recompute+move";
  }
  return "?";
}

double ActivationCost::step_s() const {
  return std::max(forward_s, write_s) + std::max(backward_s, read_s);
}

ActivationCost activation_cost(std::span<const ActivationUnit> units, const ActivationTier& tier,
                               std::span<const ActivationChoice> choices) {
  ZR_CHECK(units.size() == choices.size(), ErrorCode::kUsage, "there is not one choice a unit",
           {.where = kPlanner, .expected = std::to_string(units.size()), .got = std::to_string(choices.size())});
  ActivationCost cost;
  for (std::size_t index = 0; index < units.size(); ++index) {
    const ActivationUnit& unit = units[index];
    const ActivationChoice choice = choices[index];
    (moves(choice) ? cost.moved_bytes : cost.resident_bytes) += bytes_of(unit, choice);
    cost.forward_s += unit.forward_s;
    cost.backward_s += unit.backward_s;
    if (recomputes(choice)) cost.recompute_s += unit.recompute_s;
  }
  cost.backward_s += cost.recompute_s;
  if (cost.moved_bytes > 0) {
    cost.write_s = static_cast<double>(cost.moved_bytes) / tier.write_bytes_per_s;
    cost.read_s = static_cast<double>(cost.moved_bytes) / tier.read_bytes_per_s;
  }
  return cost;
}

ActivationPlan plan_activations(std::span<const ActivationUnit> units, const ActivationTier& tier,
                                std::uint64_t memory_bytes) {
  require_numbers(units, tier);
  const bool can_move = tier.write_bytes_per_s > 0.0 && tier.read_bytes_per_s > 0.0;
  ActivationPlan plan;
  std::vector<std::vector<Partial>> steps{{Partial{}}};
  for (const ActivationUnit& unit : units) {
    std::vector<Partial> next;
    const std::vector<Partial>& last = steps.back();
    for (std::size_t index = 0; index < last.size(); ++index) {
      for (const ActivationChoice choice : kChoices) {
        if (moves(choice) && !can_move) continue;
        Partial one = last[index];
        (moves(choice) ? one.moved : one.resident) += bytes_of(unit, choice);
        if (one.resident > memory_bytes) continue;
        if (recomputes(choice)) one.recompute += unit.recompute_s;
        one.before = static_cast<int>(index);
        one.choice = choice;
        next.push_back(one);
      }
    }
    if (next.empty()) {
      throw Error(ErrorCode::kOutOfMemory, "the activations fit the memory in no way",
                  {.where = kPlanner,
                   .which = unit.name,
                   .expected = "a cap of at least " + format_bytes(least_resident(units, can_move)),
                   .got = format_bytes(memory_bytes),
                   .hint = can_move ? "" : "a tier to move activations to: a disk"});
    }
    next = unbeaten(std::move(next));
    if (next.size() > kMostStates) {
      next = thinned(next);
      plan.exact = false;
    }
    steps.push_back(std::move(next));
  }

  std::optional<std::tuple<double, std::uint64_t, double>> least;
  for (std::size_t last = 0; last < steps.back().size(); ++last) {
    std::vector<ActivationChoice> choices(units.size());
    int at = static_cast<int>(last);
    for (std::size_t unit = units.size(); unit-- > 0;) {
      const Partial& one = steps[unit + 1][static_cast<std::size_t>(at)];
      choices[unit] = one.choice;
      at = one.before;
    }
    const ActivationCost cost = activation_cost(units, tier, choices);
    const std::tuple key{cost.step_s(), cost.moved_bytes, cost.recompute_s};
    if (least && *least <= key) continue;
    least = key;
    plan.choices = std::move(choices);
    plan.cost = cost;
  }
  return plan;
}

std::string to_text(const ActivationPlan& plan, std::span<const ActivationUnit> units, std::uint64_t memory_bytes) {
  std::string text =
      fmt::format("  {:<24} {:<15} {:>12} {:>12} {:>12}\n", "unit", "choice", "in memory", "moved", "recompute ms");
  for (std::size_t index = 0; index < units.size(); ++index) {
    const ActivationUnit& unit = units[index];
    const ActivationChoice choice = plan.choices[index];
    const std::uint64_t bytes = bytes_of(unit, choice);
    text += fmt::format("  {:<24} {:<15} {:>12} {:>12} {:>12.3f}\n", unit.name, name_of(choice),
                        format_bytes(moves(choice) ? 0 : bytes), format_bytes(moves(choice) ? bytes : 0),
                        recomputes(choice) ? 1e3 * unit.recompute_s : 0.0);
  }
  const ActivationCost& cost = plan.cost;
  text +=
      fmt::format("  forward   {:.3f} ms of computation beside {:.3f} ms of writes: bound by {}\n",
                  1e3 * cost.forward_s, 1e3 * cost.write_s, cost.write_s > cost.forward_s ? "the tier" : "computation");
  text += fmt::format(
      "  backward  {:.3f} ms of computation ({:.3f} of it recompute) beside {:.3f} ms of reads: bound by {}\n",
      1e3 * cost.backward_s, 1e3 * cost.recompute_s, 1e3 * cost.read_s,
      cost.read_s > cost.backward_s ? "the tier" : "computation");
  text += fmt::format("  step      {:.3f} ms\n", 1e3 * cost.step_s());
  text +=
      fmt::format("  memory    {} of {}{}", format_bytes(cost.resident_bytes), format_bytes(memory_bytes),
                  plan.exact ? "" : "; too many different units to look at all: there may be a slightly better choice");
  return text;
}

}  // namespace zeroth
