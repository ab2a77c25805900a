#include "libtorch/experts/expert_call.h"
#include "libtorch/experts/expert_ranks_state.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <span>
#include <utility>

namespace zeroth::libtorch {
namespace {

constexpr int kMostPieces = 64;
constexpr std::int64_t kMostCopies = std::int64_t{1} << 20U;

Hops hops_of(const RankGroup& group) {
  CommBackend& backend = group.communicator().backend();
  const std::span<const int> nodes = backend.node_sizes();
  const int of_node = nodes.front();
  if (std::ranges::any_of(nodes, [&](int size) { return size != of_node; }))
    refuse_experts(group.who(), "two_hops", "nodes have other numbers of ranks", "as many ranks of the group on each",
                   c10::str(std::vector<int>(nodes.begin(), nodes.end())));
  const int rank = group.rank();
  // All ranks make both calls.
  std::shared_ptr<CommBackend> inner = backend.split(rank / of_node, rank, "node");
  std::shared_ptr<CommBackend> outer = backend.split(rank % of_node, rank, "nodes");
  return {.inner = RankGroup(Communicator(std::move(inner)), group.rethrow()),
          .outer = RankGroup(Communicator(std::move(outer)), group.rethrow())};
}

/// The axes of "ep,tp".
std::vector<std::string> axes_in(const std::string& over) {
  std::vector<std::string> axes(1);
  for (const char letter : over) {
    if (letter == ',')
      axes.emplace_back();
    else
      axes.back() += letter;
  }
  return axes;
}

ExpertOptions options_of(const ExpertsConfig& config) {
  return {
      .meet = meet_at_of(config.meet), .copies = config.copies, .pieces = config.pieces, .two_hops = config.two_hops};
}

}  // namespace

int PieceTrials::next(std::int64_t most) {
  for (std::size_t at = 0; at < candidates_.size(); ++at) {
    if (candidates_[at].times >= kTimes || candidates_[at].pieces > std::max<std::int64_t>(most, 1)) continue;
    last_ = at;
    return candidates_[at].pieces;
  }
  const auto better = [](const Candidate& a, const Candidate& b) {
    return a.times > 0 && (b.times == 0 || a.least < b.least);
  };
  last_ = static_cast<std::size_t>(std::ranges::min_element(candidates_, better) - candidates_.begin());
  return candidates_[last_].pieces;
}

void PieceTrials::heard(std::int64_t nanoseconds) {
  Candidate& last = candidates_[measured_];
  if (nanoseconds == 0 || last.times >= kTimes) return;
  last.least = last.times == 0 ? nanoseconds : std::min(last.least, nanoseconds);
  ++last.times;
}

ExpertRanks::ExpertRanks(RankGroup group, ExpertOptions options, std::vector<std::string> axes,
                         std::optional<RankGroup> alike)
    : state_(std::make_shared<State>(
          State{.group = std::move(group), .axes = std::move(axes), .alike = std::move(alike)})) {
  set_options(options);
}

std::optional<ExpertRanks> ExpertRanks::of_mesh(Mesh& mesh, const ExpertsConfig& config,
                                                const RankGroup::Rethrow& rethrow) {
  std::vector<std::string> axes;
  const std::vector<std::string> over = axes_in(config.over);
  for (const MeshAxis& axis : mesh.spec().axes)
    if (axis.size > 1 && std::ranges::find(over, axis.name) != over.end()) axes.push_back(axis.name);
  if (axes.empty()) return {};
  std::optional<RankGroup> alike;
  if (axes.back() == "tp") alike.emplace(mesh.axis("tp"), rethrow);
  RankGroup group(axes.size() == 1 ? mesh.axis(axes.front()) : mesh.axes(axes), rethrow);
  return ExpertRanks(std::move(group), options_of(config), std::move(axes), std::move(alike));
}

const std::vector<std::string>& ExpertRanks::axes() const {
  return state_->axes;
}

const std::optional<RankGroup>& ExpertRanks::alike() const {
  return state_->alike;
}

const RankGroup& ExpertRanks::group() const {
  return state_->group;
}

const ExpertOptions& ExpertRanks::options() const {
  return state_->options;
}

ExpertRanks ExpertRanks::of_another_layer() const {
  auto state = std::make_shared<State>(*state_);
  state->trials = {};
  state->pieces = 1;
  return ExpertRanks(std::move(state));
}

int ExpertRanks::pieces() const {
  return state_->pieces;
}

void ExpertRanks::set_options(ExpertOptions options) const {
  const std::string who = state_->group.who();
  if (options.copies < 0 || options.copies > kMostCopies)
    refuse_experts(who, "copies", "a rank cannot hold so many copies", c10::str("0 to ", kMostCopies),
                   c10::str(options.copies));
  if (options.pieces < 0 || options.pieces > kMostPieces)
    refuse_experts(who, "pieces", "there are no such pieces", c10::str("0 (measured) to ", kMostPieces),
                   c10::str(options.pieces));
  if (options.two_hops && !state_->hops) state_->hops.emplace(hops_of(state_->group));
  state_->options = options;
}

}  // namespace zeroth::libtorch
