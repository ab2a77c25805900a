#include "engine/judge.h"

#include "engine/odd_rank.h"

#include <algorithm>

namespace zeroth {
namespace {

constexpr std::size_t kNormWords = kernels::NormAccumulator::kWords;
constexpr std::size_t kFieldsPerWord = 4;
constexpr unsigned kFieldBits = 16;
constexpr std::size_t kWordsPerRank = 11;
constexpr std::int64_t kFailed = 1;
constexpr std::int64_t kIdle = 2;
constexpr std::int64_t kDiscards = 4;
constexpr std::int64_t kPreempted = 8;
constexpr unsigned kFlagBits = 8;  // above them: micro-steps without a batch

}  // namespace

Verdict judge(const Evidence& evidence, const Communicator& communicator) {
  const std::size_t params = evidence.touched.size();
  const std::size_t touched_words = (params + kFieldsPerWord - 1) / kFieldsPerWord;
  const auto world = static_cast<std::size_t>(communicator.size());
  std::vector<std::int64_t> message(kNormWords + touched_words + world * kWordsPerRank, 0);
  std::ranges::copy(evidence.norm.words(), message.begin());
  for (std::size_t param = 0; param < params; ++param) {
    if (!evidence.touched[param]) continue;
    message[kNormWords + param / kFieldsPerWord] += std::int64_t{1} << (kFieldBits * (param % kFieldsPerWord));
  }
  const std::size_t ranks_begin = kNormWords + touched_words;
  std::int64_t* own = message.data() + ranks_begin + static_cast<std::size_t>(communicator.rank()) * kWordsPerRank;
  own[0] = evidence.offender.param + 1;
  own[1] = evidence.offender.micro_step;
  own[2] = static_cast<std::int64_t>(evidence.offender.count);
  own[3] = (evidence.failed ? kFailed : 0) | (evidence.idle ? kIdle : 0) | (evidence.discards ? kDiscards : 0) |
           (evidence.preempted ? kPreempted : 0) | (std::int64_t{evidence.joined} << kFlagBits);
  own[4] = evidence.groups;
  own[5] = evidence.backwards;
  own[6] = evidence.times.between_us;
  own[7] = evidence.times.forward_us;
  own[8] = evidence.times.backward_us;
  own[9] = evidence.times.step_us;
  own[10] = evidence.times.waited_us;

  communicator.all_reduce(std::span<std::int64_t>(message));

  Verdict verdict;
  std::copy_n(message.begin(), kNormWords, verdict.norm.words().begin());
  verdict.touched.resize(params);
  for (std::size_t param = 0; param < params; ++param) {
    const auto word = static_cast<std::uint64_t>(message[kNormWords + param / kFieldsPerWord]);
    verdict.touched[param] = ((word >> (kFieldBits * (param % kFieldsPerWord))) & 0xffffU) != 0;
  }
  std::vector<std::int64_t> groups;
  for (std::size_t rank = 0; rank < world; ++rank) {
    const std::int64_t* theirs = message.data() + ranks_begin + rank * kWordsPerRank;
    if ((theirs[3] & kFailed) != 0 && verdict.failed_rank < 0) verdict.failed_rank = static_cast<int>(rank);
    if ((theirs[3] & kIdle) != 0 && verdict.idle_rank < 0) verdict.idle_rank = static_cast<int>(rank);
    int& same = (theirs[3] & kDiscards) != 0 ? verdict.discarding_rank : verdict.keeping_rank;
    if (same < 0) same = static_cast<int>(rank);
    if ((theirs[3] & kPreempted) != 0 && verdict.preempted_rank < 0) verdict.preempted_rank = static_cast<int>(rank);
    if (theirs[5] != message[ranks_begin + 5] && verdict.uneven_rank < 0) verdict.uneven_rank = static_cast<int>(rank);
    verdict.joined += theirs[3] >> kFlagBits;
    verdict.backwards.push_back(theirs[5]);
    verdict.times.push_back({.between_us = theirs[6],
                             .forward_us = theirs[7],
                             .backward_us = theirs[8],
                             .step_us = theirs[9],
                             .waited_us = theirs[10]});
    groups.push_back(theirs[4]);
    if (theirs[0] == 0) continue;
    // The earliest micro-step; among equals the lowest rank.
    if (verdict.offender_rank < 0 || theirs[1] < verdict.offender.micro_step) {
      verdict.offender = {static_cast<int>(theirs[0] - 1), theirs[1], static_cast<std::uint64_t>(theirs[2])};
      verdict.offender_rank = static_cast<int>(rank);
    }
  }
  const OddRank odd = find_odd_rank(groups);
  verdict.usual_groups_rank = odd.usual;
  verdict.other_groups_rank = odd.odd;
  return verdict;
}

}  // namespace zeroth
