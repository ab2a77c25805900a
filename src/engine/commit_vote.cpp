#include "engine/commit_vote.h"

#include "engine/odd_rank.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <span>
#include <string>
#include <string_view>

namespace zeroth {
namespace {

constexpr std::size_t kNormWords = kernels::NormAccumulator::kWords;
constexpr std::size_t kFieldsPerWord = 4;
constexpr unsigned kFieldBits = 16;
constexpr std::size_t kTrainsWord = 11;  // the last words of a rank, one a shard group
constexpr std::int64_t kFailed = 1;
constexpr std::int64_t kIdle = 2;
constexpr std::int64_t kDiscards = 4;
constexpr std::int64_t kPreempted = 8;
constexpr std::int64_t kOut = 16;
constexpr std::int64_t kSaveEnded = 32;
constexpr std::int64_t kSaveFailed = 64;
constexpr std::int64_t kUpdated = 128;
constexpr unsigned kFlagBits = 8;  // above them: micro-steps without a batch

std::size_t has_grad_words(std::size_t params) {
  return (params + kFieldsPerWord - 1) / kFieldsPerWord;
}

void count(const std::vector<bool>& has_grad, std::span<std::int64_t> words) {
  for (std::size_t param = 0; param < has_grad.size(); ++param) {
    if (has_grad[param]) words[param / kFieldsPerWord] += std::int64_t{1} << (kFieldBits * (param % kFieldsPerWord));
  }
}

std::vector<bool> counted(std::size_t params, std::span<const std::int64_t> words) {
  std::vector<bool> has_grad(params);
  for (std::size_t param = 0; param < params; ++param) {
    const auto word = static_cast<std::uint64_t>(words[param / kFieldsPerWord]);
    has_grad[param] = ((word >> (kFieldBits * (param % kFieldsPerWord))) & 0xffffU) != 0;
  }
  return has_grad;
}

/// What a rank says of the parameters of a shard group.
struct Said {
  int rank = 0;
  int color = 0;  ///< of its shard group
  std::int64_t digest = 0;
};

/// Ranks of the job, of the first color of `all` in which they differ.
OddRank find_odd_of_colors(std::vector<Said> all) {
  while (!all.empty()) {
    const int color = all.front().color;
    std::vector<int> ranks;
    std::vector<std::int64_t> digests;
    for (const Said& one : all) {
      if (one.color != color) continue;
      ranks.push_back(one.rank);
      digests.push_back(one.digest);
    }
    std::erase_if(all, [color](const Said& one) { return one.color == color; });
    const OddRank found = find_odd_rank(digests);
    if (found.odd < 0) continue;
    return {.usual = ranks[static_cast<std::size_t>(found.usual)], .odd = ranks[static_cast<std::size_t>(found.odd)]};
  }
  return {};
}

/// The first shard group in which ranks differ.
OtherWrites find_other(std::vector<std::vector<Said>> said) {
  for (std::size_t group = 0; group < said.size(); ++group) {
    const OddRank found = find_odd_of_colors(std::move(said[group]));
    if (found.odd >= 0) return {.usual = found.usual, .odd = found.odd, .group = static_cast<int>(group)};
  }
  return {};
}

int color_of(std::span<const GroupColors> groups, std::size_t group, std::size_t rank) {
  return groups.empty() ? 0 : groups[group][rank];
}

}  // namespace

std::vector<bool> on_any_rank(const std::vector<bool>& has_grad, const Communicator& group) {
  std::vector<std::int64_t> words(has_grad_words(has_grad.size()), 0);
  count(has_grad, words);
  if (!words.empty()) group.all_reduce(std::span<std::int64_t>(words));
  return counted(has_grad.size(), words);
}

CommitVote take_commit_vote(const Ballot& ballot, const Communicator& communicator,
                            std::span<const GroupColors> groups) {
  const std::size_t params = ballot.has_grad.size();
  const std::size_t params_words = has_grad_words(params);
  ZR_ASSERT(ballot.writes.size() == ballot.trains.size(), "a ballot has one word of both kinds a shard group");
  const std::size_t words_per_rank = kTrainsWord + 2 * ballot.trains.size();
  const auto world = static_cast<std::size_t>(communicator.size());
  std::vector<std::int64_t> message(kNormWords + params_words + world * words_per_rank, 0);
  std::ranges::copy(ballot.norm.words(), message.begin());
  count(ballot.has_grad, std::span(message).subspan(kNormWords, params_words));
  const std::size_t ranks_begin = kNormWords + params_words;
  std::int64_t* own = message.data() + ranks_begin + static_cast<std::size_t>(communicator.rank()) * words_per_rank;
  own[0] = ballot.offender.param + 1;
  own[1] = ballot.offender.micro_step;
  own[2] = static_cast<std::int64_t>(ballot.offender.count);
  own[3] = (ballot.failed ? kFailed : 0) | (ballot.idle ? kIdle : 0) | (ballot.discards ? kDiscards : 0) |
           (ballot.preempted ? kPreempted : 0) | (ballot.out ? kOut : 0) | (ballot.save_ended ? kSaveEnded : 0) |
           (ballot.save_failed ? kSaveFailed : 0) | (ballot.updated ? kUpdated : 0) |
           (std::int64_t{ballot.joined} << kFlagBits);
  own[4] = ballot.groups;
  own[5] = ballot.backwards;
  own[6] = ballot.times.between_us;
  own[7] = ballot.times.forward_us;
  own[8] = ballot.times.backward_us;
  own[9] = ballot.times.step_us;
  own[10] = ballot.times.waited_us;
  std::int64_t* const end = std::ranges::copy(ballot.trains, own + kTrainsWord).out;
  std::ranges::copy(ballot.writes, end);

  communicator.all_reduce(std::span<std::int64_t>(message));

  CommitVote vote;
  std::copy_n(message.begin(), kNormWords, vote.norm.words().begin());
  vote.has_grad = counted(params, std::span<const std::int64_t>(message).subspan(kNormWords, params_words));
  std::vector<std::int64_t> hypers;
  std::vector<std::vector<Said>> trains(ballot.trains.size());
  std::vector<std::vector<Said>> writes(ballot.trains.size());
  for (std::size_t rank = 0; rank < world; ++rank) {
    const std::int64_t* theirs = message.data() + ranks_begin + rank * words_per_rank;
    if ((theirs[3] & kFailed) != 0 && vote.failed_rank < 0) vote.failed_rank = static_cast<int>(rank);
    if ((theirs[3] & kIdle) != 0 && vote.idle_rank < 0) vote.idle_rank = static_cast<int>(rank);
    int& same = (theirs[3] & kDiscards) != 0 ? vote.discarding_rank : vote.keeping_rank;
    if (same < 0) same = static_cast<int>(rank);
    if ((theirs[3] & kUpdated) != 0 && vote.updated_rank < 0) vote.updated_rank = static_cast<int>(rank);
    if ((theirs[3] & kPreempted) != 0 && vote.preempted_rank < 0) vote.preempted_rank = static_cast<int>(rank);
    if (theirs[5] != message[ranks_begin + 5] && vote.uneven_rank < 0) vote.uneven_rank = static_cast<int>(rank);
    vote.joined += theirs[3] >> kFlagBits;
    vote.backwards.push_back(theirs[5]);
    vote.times.push_back({.between_us = theirs[6],
                          .forward_us = theirs[7],
                          .backward_us = theirs[8],
                          .step_us = theirs[9],
                          .waited_us = theirs[10]});
    if (rank == 0) vote.save_ended = (theirs[3] & kSaveEnded) != 0;
    if (rank == 0) vote.save_failed = (theirs[3] & kSaveFailed) != 0;
    hypers.push_back(theirs[4]);
    for (std::size_t group = 0; group < trains.size(); ++group) {
      Said said{.rank = static_cast<int>(rank),
                .color = color_of(groups, group, rank),
                .digest = theirs[kTrainsWord + trains.size() + group]};
      writes[group].push_back(said);
      if ((theirs[3] & kOut) != 0) continue;  // one without a batch ran no forward, which would have looked
      said.digest = theirs[kTrainsWord + group];
      trains[group].push_back(said);
    }
    if (theirs[0] == 0) continue;
    // The earliest micro-step; among equals the lowest rank.
    if (vote.offender_rank < 0 || theirs[1] < vote.offender.micro_step) {
      vote.offender = {static_cast<int>(theirs[0] - 1), theirs[1], static_cast<std::uint64_t>(theirs[2])};
      vote.offender_rank = static_cast<int>(rank);
    }
  }
  const OddRank odd = find_odd_rank(hypers);
  vote.usual_groups_rank = odd.usual;
  vote.other_groups_rank = odd.odd;
  const OtherWrites other_trains = find_other(std::move(trains));
  vote.usual_trains_rank = other_trains.usual;
  vote.other_trains_rank = other_trains.odd;
  vote.other_trains_group = other_trains.group;
  const OtherWrites other_writes = find_other(std::move(writes));
  vote.usual_writes_rank = other_writes.usual;
  vote.other_writes_rank = other_writes.odd;
  vote.other_writes_group = other_writes.group;
  return vote;
}

std::int64_t digest_of(const std::vector<std::int64_t>& writes) {
  if (std::ranges::all_of(writes, [](std::int64_t one) { return one == 0; })) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(writes.data()), writes.size() * sizeof(std::int64_t));
  return static_cast<std::int64_t>(digest64(bytes) >> 1U);
}

OtherWrites compare_writes(const std::vector<std::int64_t>& digests, const Communicator& communicator,
                           std::span<const GroupColors> groups) {
  const auto world = static_cast<std::size_t>(communicator.size());
  std::vector<std::int64_t> all(digests.size() * world);
  communicator.all_gather(std::span<const std::int64_t>(digests), std::span(all));
  std::vector<std::vector<Said>> said(digests.size());
  for (std::size_t group = 0; group < digests.size(); ++group) {
    for (std::size_t rank = 0; rank < world; ++rank) {
      said[group].push_back({.rank = static_cast<int>(rank),
                             .color = color_of(groups, group, rank),
                             .digest = all[rank * digests.size() + group]});
    }
  }
  return find_other(std::move(said));
}

std::int64_t digest_of(const std::vector<bool>& trains) {
  std::string text;
  for (const bool one : trains) text += one ? '1' : '0';
  return static_cast<std::int64_t>(digest64(text) >> 1U);
}

namespace {

/// The ranks of a shard group, and one value a parameter of each.
template <class Value>
class OfMembers {
 public:
  /// Of the group that rank `one` is in.
  OfMembers(const OwnTerms& own, int one, int world) : own_(own) {
    const auto color = [&own](int rank) { return own.colors[static_cast<std::size_t>(rank)]; };
    for (int rank = 0; rank < world; ++rank) {
      if (color(rank) == color(one)) members_.push_back(rank);
    }
  }
  [[nodiscard]] bool has_own_rank() const { return std::ranges::find(members_, own_.rank) != members_.end(); }
  /// Blocking, on ranks of the group.
  void gather(std::span<const Value> mine) {
    params_ = mine.size();
    all_.resize(params_ * members_.size());
    own_.communicator.all_gather(mine, std::span(all_));
  }
  [[nodiscard]] std::span<const Value> of(int rank) const {
    const auto member = static_cast<std::size_t>(std::ranges::find(members_, rank) - members_.begin());
    return std::span<const Value>(all_).subspan(params_ * member, params_);
  }

 private:
  const OwnTerms& own_;
  std::vector<int> members_;  // ranks of the job, by rank of the group
  std::size_t params_ = 0;
  std::vector<Value> all_;
};

/// kMismatch, on the ranks of the shard group with the first parameter that one of two ranks trains and the other does
/// not.
[[noreturn]] void throw_other_trainability(const CommitVote& vote, const OwnTerms& own, int world) {
  ErrorContext context{
      .where = "engine.step",
      .who = "rank " + std::to_string(vote.other_trains_rank) + "/" + std::to_string(world),
      .hint = "set requires_grad alike on all ranks, say with layers drawn from one seed; nothing was updated"};
  OfMembers<std::uint8_t> members(own, vote.other_trains_rank, world);
  if (!members.has_own_rank()) {
    context.expected = "what rank " + std::to_string(vote.usual_trains_rank) + " trains";
    throw Error(ErrorCode::kMismatch, "ranks train different parameters", std::move(context));
  }
  const std::vector<std::uint8_t> mine(own.trains.begin(), own.trains.end());
  members.gather(mine);
  const std::span<const std::uint8_t> usual = members.of(vote.usual_trains_rank);
  const auto index =
      static_cast<std::size_t>(std::ranges::mismatch(usual, members.of(vote.other_trains_rank)).in1 - usual.begin());
  ZR_ASSERT(index < mine.size(), "ranks' digests of what they train differ but their lists do not");
  const auto says = [&](int rank) {
    return std::string(members.of(rank)[index] != 0 ? "trainable" : "frozen") + " (rank " + std::to_string(rank) + ")";
  };
  context.which = own.params[index].name;
  context.expected = says(vote.usual_trains_rank);
  context.got = says(vote.other_trains_rank);
  throw Error(ErrorCode::kMismatch, "ranks train different parameters", std::move(context));
}

}  // namespace

void throw_other_writes(const OtherWrites& found, const OwnTerms& own, int world) {
  ErrorContext context{.where = "engine.writes",
                       .who = "rank " + std::to_string(found.odd) + "/" + std::to_string(world),
                       .hint =
                           "write alike on all ranks, or give the values of one rank to all: "
                           "engine.load_state_dict(state) takes rank 0's, engine.gathered() with a rank that writes "
                           "(modify_on=rank in Python) that rank's; nothing was changed"};
  OfMembers<std::int64_t> members(own, found.odd, world);
  constexpr const char* kText = "a script wrote other values to parameters on one rank than on others";
  if (!members.has_own_rank()) {
    context.expected = "what rank " + std::to_string(found.usual) + " wrote";
    throw Error(ErrorCode::kMismatch, kText, std::move(context));
  }
  const std::size_t params = own.writes.size();
  members.gather(own.writes);
  const std::span<const std::int64_t> usual = members.of(found.usual);
  const std::span<const std::int64_t> odd = members.of(found.odd);
  std::vector<std::string> names;
  std::size_t first = params;
  for (std::size_t param = 0; param < params; ++param) {
    if (usual[param] == odd[param]) continue;
    first = std::min(first, param);
    names.push_back(own.params[param].name);
  }
  ZR_ASSERT(first < params, "ranks' digests of what was written differ but their lists do not");
  const auto says = [&](std::int64_t digest, int rank) {
    return std::string(digest != 0 ? "written" : "not written") + " on rank " + std::to_string(rank);
  };
  constexpr std::size_t kMost = 3;
  const std::size_t more = names.size() > kMost ? names.size() - kMost : 0;
  names.resize(std::min(names.size(), kMost));
  context.which = join(names, ", ") + (more > 0 ? " and " + std::to_string(more) + " more" : "");
  context.expected = says(usual[first], found.usual) + ", and the same on all ranks";
  context.got = says(odd[first], found.odd) + (usual[first] != 0 && odd[first] != 0 ? ", with other values" : "");
  throw Error(ErrorCode::kMismatch, kText, std::move(context));
}

void throw_other_groups(const std::vector<GroupHyper>& groups, int usual, int odd, const Communicator& communicator) {
  static constexpr std::string_view kNames[] = {"lr",           "beta1",    "beta2",     "eps",
                                                "weight_decay", "momentum", "dampening", "nesterov"};
  constexpr std::size_t kValues = std::size(kNames);
  std::vector<double> own;
  for (const GroupHyper& group : groups) {
    own.insert(own.end(), {group.lr, group.beta1, group.beta2, group.eps, group.weight_decay, group.momentum,
                           group.dampening, group.nesterov ? 1.0 : 0.0});
  }
  std::vector<double> all(own.size() * static_cast<std::size_t>(communicator.size()));
  communicator.all_gather(std::span<const double>(own), std::span(all));
  const auto values_of = [&](int rank) {
    return std::span<const double>(all).subspan(own.size() * static_cast<std::size_t>(rank), own.size());
  };
  const std::span<const double> expected = values_of(usual);
  const std::span<const double> got = values_of(odd);
  const auto same_bits = [](double a, double b) {
    return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
  };  // as the digests
  const auto index = static_cast<std::size_t>(std::ranges::mismatch(expected, got, same_bits).in1 - expected.begin());
  ZR_ASSERT(index < own.size(), "ranks' digests of their parameter groups differ but their values do not");
  throw Error(ErrorCode::kMismatch, "ranks set different hyper-parameters",
              {.where = "engine.step",
               .who = "rank " + std::to_string(odd) + "/" + std::to_string(communicator.size()),
               .which = std::string(kNames[index % kValues]) + " of parameter group " + std::to_string(index / kValues),
               .expected = shortest_text(expected[index]) + " (rank " + std::to_string(usual) + ")",
               .got = shortest_text(got[index]) + " (rank " + std::to_string(odd) + ")",
               .hint = "change groups alike on all ranks, before step(); nothing was updated"});
}

void throw_idle(int idle_rank, int world) {
  throw Error(ErrorCode::kUsage, "step() without a backward since the last step()",
              {.where = "engine.step",
               .who = "rank " + std::to_string(idle_rank) + "/" + std::to_string(world),
               .hint = "call backward(loss) on every rank in every micro-step; nothing was changed"});
}

void throw_not_all_discard(const CommitVote& vote, int world) {
  const std::string of = "/" + std::to_string(world);
  throw Error(ErrorCode::kMismatch, "some ranks discard their gradients, others call step()",
              {.where = "engine.vote",
               .who = "rank " + std::to_string(vote.discarding_rank) + of,
               .expected = "step() on all ranks, or zero_grad() on all",
               .got = "zero_grad() on rank " + std::to_string(vote.discarding_rank) + of + ", step() on rank " +
                      std::to_string(vote.keeping_rank) + of,
               .hint = "whether a batch is thrown away has to be decided alike on all ranks; nothing was updated"});
}

void throw_if_refused(const CommitVote& vote, const OwnTerms& own, const Communicator& communicator) {
  if (vote.discarding_rank >= 0) throw_not_all_discard(vote, communicator.size());
  if (vote.idle_rank >= 0) throw_idle(vote.idle_rank, communicator.size());
  if (vote.other_groups_rank >= 0) {
    throw_other_groups(own.groups, vote.usual_groups_rank, vote.other_groups_rank, communicator);
  }
  if (vote.other_trains_rank >= 0) throw_other_trainability(vote, own, communicator.size());
  if (vote.other_writes_rank >= 0) {
    throw_other_writes(
        {.usual = vote.usual_writes_rank, .odd = vote.other_writes_rank, .group = vote.other_writes_group}, own,
        communicator.size());
  }
}

}  // namespace zeroth
