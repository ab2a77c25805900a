#include "program/checks.h"

#include <zeroth/base/error.h>

#include <algorithm>
#include <cstddef>

namespace zeroth {

ActionIndex::ActionIndex(const StepProgram& program)
    : micro_batches_(static_cast<std::size_t>(program.micro_batches)),
      positions_(program.rank_of_chunk.size() * micro_batches_) {
  for (auto& positions : positions_) positions.fill(-1);
  if (program.shares_head()) vocabulary_.resize(program.actions.size() * micro_batches_);
  for (auto& positions : vocabulary_) positions.fill(-1);
  for (int rank = 0; rank < program.ranks(); ++rank) {
    const std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
    for (int place = 0; place < static_cast<int>(actions.size()); ++place) {
      const Action& action = actions[static_cast<std::size_t>(place)];
      if (action.micro_batch < 0) continue;
      int& position = slot(action, rank);
      if (position >= 0 && twice_.empty()) twice_ = {place_of(program, rank, position), place_of(program, rank, place)};
      if (position < 0) position = place;
    }
  }
}

int& ActionIndex::slot(const Action& action, int rank) {
  const auto kind = static_cast<std::size_t>(action.kind);
  if (is_vocabulary(action.kind)) return vocabulary_[pair(rank, action.micro_batch)][kind - kPairKinds];
  return positions_[pair(action.chunk, action.micro_batch)][kind];
}

int ActionIndex::gradient(int chunk, int micro_batch) const {
  return std::max(position(ActionKind::kBackward, chunk, micro_batch),
                  position(ActionKind::kBackwardInput, chunk, micro_batch));
}

int ActionIndex::vocabulary(ActionKind kind, int rank, int micro_batch) const {
  return has_vocabulary() ? vocabulary_[pair(rank, micro_batch)][static_cast<std::size_t>(kind) - kPairKinds] : -1;
}

Refutation::Place place_of(const StepProgram& program, int rank, int index) {
  const std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
  if (index < 0) return {.rank = rank, .index = static_cast<int>(actions.size())};
  return {.rank = rank, .index = index, .action = to_text(actions[static_cast<std::size_t>(index)])};
}

Waits::Waits(const StepProgram& program, const ActionIndex& index, const std::vector<Dependence>& dependences)
    : program_(program), index_(index) {
  for (const Dependence& dependence : dependences) {
    const Site first = site_of(dependence.first);
    const Site then = site_of(dependence.then);
    more_[{then.rank, then.index}].push_back(first);
  }
}

Site Waits::site_of(const Action& action) const {
  const bool in_range = is_computation(action.kind) && has_its_numbers(action) && action.chunk < program_.chunks() &&
                        action.micro_batch < program_.micro_batches;
  const int position = in_range ? index_.position(action.kind, action.chunk, action.micro_batch) : -1;
  ZR_CHECK(position >= 0, ErrorCode::kUsage, "a dependence is of a computation that the program does not have",
           {.where = "program.dependences", .which = program_.schedule, .got = to_text(action)});
  return {.rank = rank_of(program_, action.chunk), .index = position};
}

void Waits::on_all_ranks(ActionKind kind, int micro_batch, std::vector<Site>& sites) const {
  for (int rank = 0; rank < program_.ranks(); ++rank)
    sites.push_back({.rank = rank, .index = index_.vocabulary(kind, rank, micro_batch)});
}

void Waits::of_vocabulary(const Action& action, Site site, std::vector<Site>& sites) const {
  const int m = action.micro_batch;
  if (action.kind == ActionKind::kVocabScores) {
    const int root = program_.rank_of_chunk.back();
    sites.push_back({.rank = root, .index = index_.vocabulary(ActionKind::kVocabInput, root, m)});
  }
  if (action.kind == ActionKind::kVocabGradients) on_all_ranks(ActionKind::kVocabSum, m, sites);
  const bool first_gradient = action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardInput;
  if (!first_gradient || action.chunk != program_.chunks() - 1) return;
  const bool summed_later = index_.vocabulary(ActionKind::kVocabInputGradient, site.rank, m) >= 0;
  on_all_ranks(summed_later ? ActionKind::kVocabInputGradient : ActionKind::kVocabSum, m, sites);
}

void Waits::of(Site site, std::vector<Site>& sites) const {
  sites.clear();
  const Action& action = program_.actions[static_cast<std::size_t>(site.rank)][static_cast<std::size_t>(site.index)];
  if (is_message(action.kind) && !is_send(action.kind)) {
    const Action send = counterpart(action);
    sites.push_back(
        {.rank = rank_of(program_, send.chunk), .index = index_.position(send.kind, send.chunk, send.micro_batch)});
  }
  if (index_.has_vocabulary()) of_vocabulary(action, site, sites);
  if (const auto more = more_.find({site.rank, site.index}); more != more_.end())
    sites.insert(sites.end(), more->second.begin(), more->second.end());
}

}  // namespace zeroth
