#include "program/checks.h"

#include <array>
#include <cstddef>
#include <span>

namespace zeroth {
namespace {

/// In the order in which a rank has them.
constexpr std::array kOrder{ActionKind::kVocabInput, ActionKind::kVocabScores, ActionKind::kVocabSum,
                            ActionKind::kVocabGradients, ActionKind::kVocabInputGradient};

bool is_collective(ActionKind kind) {
  return kind == ActionKind::kVocabInput || kind == ActionKind::kVocabSum || kind == ActionKind::kVocabInputGradient;
}

struct Collective {
  int place;
  Action action;
};

std::vector<Collective> collectives_of(const std::vector<Action>& actions) {
  std::vector<Collective> result;
  for (int place = 0; place < static_cast<int>(actions.size()); ++place) {
    const Action& action = actions[static_cast<std::size_t>(place)];
    if (is_collective(action.kind)) result.push_back({.place = place, .action = action});
  }
  return result;
}

/// The order of one micro-batch on one rank.
std::optional<Refutation> refute_rank(const StepProgram& program, const ActionIndex& index, int rank, int m,
                                      std::span<const ActionKind> kinds) {
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const int place = index.vocabulary(kinds[i], rank, m);
    const auto refuted = [&](const char* what, int second) {
      return Refutation{.what = what,
                        .places = {place_of(program, rank, place), place_of(program, rank, second)},
                        .expected = "the other order"};
    };
    if (place < 0)
      return Refutation{.what = "a rank has no part in the output layer of a micro-batch",
                        .places = {place_of(program, rank, -1)},
                        .expected = to_text(Action{.kind = kinds[i], .micro_batch = m})};
    if (i > 0 && index.vocabulary(kinds[i - 1], rank, m) > place)
      return refuted("the parts of the output layer are in another order", index.vocabulary(kinds[i - 1], rank, m));
    if (i > 0 || rank != program.rank_of_chunk.back()) continue;
    const int last = program.chunks() - 1;
    const int forward = index.position(ActionKind::kForward, last, m);
    if (forward > place) return refuted("the output layer comes before its input", forward);
    const int gradient = index.gradient(last, m);
    // With V_GRAD the gradient of the input is there after it, else after V_SUM.
    const ActionKind source = kinds.size() == kOrder.size() ? ActionKind::kVocabInputGradient : ActionKind::kVocabSum;
    const int sum = index.vocabulary(source, rank, m);
    if (sum >= 0 && gradient >= 0 && gradient < sum)
      return Refutation{.what = "a backward comes before the output layer",
                        .places = {place_of(program, rank, gradient), place_of(program, rank, sum)},
                        .expected = "the other order"};
  }
  return std::nullopt;
}

}  // namespace

std::optional<Refutation> refute_vocabulary_counts(const StepProgram& program) {
  std::array<std::size_t, kOrder.size()> counts{};
  for (const std::vector<Action>& actions : program.actions) {
    for (const Action& action : actions) {
      for (std::size_t i = 0; i < kOrder.size(); ++i) counts[i] += action.kind == kOrder[i];
    }
  }
  const std::size_t all = program.actions.size() * static_cast<std::size_t>(program.micro_batches);
  const bool none = counts == decltype(counts){};
  for (std::size_t i = 0; i < kOrder.size(); ++i) {
    const bool may_be_left_out = none || kOrder[i] == ActionKind::kVocabInputGradient;
    if (counts[i] == all || (may_be_left_out && counts[i] == 0)) continue;
    return Refutation{.what = "a split output layer is not whole",
                      .expected = std::string(name_of(kOrder[i])) + " of every micro-batch on every rank: " +
                                  std::to_string(all) + ", not " + std::to_string(counts[i])};
  }
  return std::nullopt;
}

std::optional<Refutation> refute_vocabulary(const StepProgram& program, const ActionIndex& index) {
  if (!index.has_vocabulary()) return std::nullopt;
  const bool gradients = index.vocabulary(ActionKind::kVocabInputGradient, 0, 0) >= 0;
  const std::span<const ActionKind> kinds = std::span(kOrder).first(gradients ? kOrder.size() : kOrder.size() - 1);
  const std::vector<Collective> first = collectives_of(program.actions.front());
  for (int rank = 0; rank < program.ranks(); ++rank) {
    for (int m = 0; m < program.micro_batches; ++m) {
      if (auto refutation = refute_rank(program, index, rank, m, kinds)) return refutation;
    }
    const std::vector<Collective> own = collectives_of(program.actions[static_cast<std::size_t>(rank)]);
    for (std::size_t turn = 0; turn < first.size(); ++turn) {
      if (own[turn].action == first[turn].action) continue;
      return Refutation{.what = "ranks have collectives in another order",
                        .places = {place_of(program, 0, first[turn].place), place_of(program, rank, own[turn].place)},
                        .expected = to_text(first[turn].action) + " on rank " + std::to_string(rank)};
    }
  }
  return std::nullopt;
}

}  // namespace zeroth
