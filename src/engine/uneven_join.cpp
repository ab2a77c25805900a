#include "engine/uneven_join.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace zeroth {
namespace {

constexpr unsigned kCallBits = 8;

/// 0: this rank listens.
std::int64_t word_of(const std::optional<Announcement>& said) {
  if (!said) return 0;
  return (static_cast<std::int64_t>(said->call) + 1) | (static_cast<std::int64_t>(said->subject) + 1) << kCallBits;
}

std::optional<Announcement> announcement_of(std::int64_t word) {
  if (word == 0) return std::nullopt;
  return Announcement{.call = static_cast<OperationId>((word & ((1 << kCallBits) - 1)) - 1),
                      .subject = static_cast<int>(word >> kCallBits) - 1};
}

}  // namespace

std::vector<int> UnevenJoin::out() const {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < out_.size(); ++rank) {
    if (out_[rank] != 0) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

std::string UnevenJoin::describe(Announcement said) const {
  const std::string name = operations_.name(said.call);
  const Operation* const row = operations_.find(said.call);
  if (said.subject < 0 || row == nullptr) return name;
  if (row->subject == Operation::Subject::kName) return name + " by a name of digest " + std::to_string(said.subject);
  const int unit = row->subject == Operation::Subject::kFlat ? model_.flat(said.subject).unit : said.subject;
  return name + " of unit " + model_.units[static_cast<std::size_t>(unit)].name;
}

std::optional<Announcement> UnevenJoin::hold(std::optional<Announcement> own) {
  sync_();
  const std::int64_t word = word_of(own);
  std::vector<std::int64_t> words(out_.size());
  communicator_.all_gather(std::span(&word, 1), std::span(words));
  int first = -1;  // who speaks
  std::optional<Announcement> said;
  bool some_have = false;
  std::vector<std::uint8_t> out(out_.size(), 1);
  for (std::size_t rank = 0; rank < words.size(); ++rank) {
    const std::optional<Announcement> theirs = announcement_of(words[rank]);
    if (!theirs) continue;
    some_have = some_have || theirs->call == calls_.batch;
    out[rank] = theirs->call == calls_.no_batch ? 1 : 0;
    if (!said) {
      first = static_cast<int>(rank);
      said = theirs;
    }
    ZR_CHECK(theirs == said || (between_batches(*theirs) && between_batches(*said)), ErrorCode::kMismatch,
             "ranks that have a batch do not do the same with it",
             {.where = "engine.uneven_join",
              .who = "rank " + std::to_string(communicator_.rank()) + "/" + std::to_string(communicator_.size()),
              .expected = describe(*said) + " on rank " + std::to_string(first),
              .got = describe(*theirs) + " on rank " + std::to_string(rank),
              .hint = "while some ranks have no batch (zeroth.uneven = \"join\") all others must make the same calls "
                      "in the same order"});
  }
  if (!said || !between_batches(*said)) return said;
  out_ = std::move(out);
  num_out_ = 0;
  for (const std::uint8_t is_out : out_) num_out_ += is_out;
  return Announcement{.call = some_have ? calls_.batch : calls_.no_batch};
}

void UnevenJoin::begin_batch(bool has_batch) {
  (void)hold(Announcement{.call = has_batch ? calls_.batch : calls_.no_batch});
}

void UnevenJoin::announce(OperationId call, int subject) {
  if (num_out_ == 0 || is_out()) return;
  (void)hold(Announcement{.call = call, .subject = subject});
  require_joinable(call);
}

void UnevenJoin::announce_backward(OperationId backward) {
  if (!std::exchange(backward_announced_, true)) announce(backward);
}

void UnevenJoin::require_joinable(OperationId call) const {
  if (const Operation* const row = operations_.find(call); row != nullptr && row->join) return;
  throw Error(ErrorCode::kUsage, "a call of all ranks while some have no batch and wait for the others",
              {.where = "engine.next_batch",
               .who = "rank " + std::to_string(communicator_.rank()) + "/" + std::to_string(communicator_.size()),
               .which = operations_.name(call),
               .expected = operations_.offered() + " until the batches of all ranks are used up",
               .got = ranks_text(out()) + " without a batch",
               .hint = "make it after the loop over the batches"});
}

std::optional<Announcement> UnevenJoin::listen() {
  return hold(std::nullopt);
}

void UnevenJoin::end() {
  out_.assign(out_.size(), 0);
  num_out_ = 0;
}

void throw_uneven(const std::vector<int>& out, std::int64_t step, const Communicator& communicator) {
  std::vector<int> others;
  for (int rank = 0; rank < communicator.size(); ++rank) {
    if (std::ranges::find(out, rank) == out.end()) others.push_back(rank);
  }
  throw Error(ErrorCode::kMismatch,
              ranks_text(out) + (out.size() == 1 ? " has" : " have") + " no batch left, " + ranks_text(others) +
                  (others.size() == 1 ? " has" : " have") + " more",
              {.where = "engine.next_batch",
               .who = "rank " + std::to_string(communicator.rank()) + "/" + std::to_string(communicator.size()),
               .which = "the batch after step " + std::to_string(step),
               .expected = "as many batches on every rank",
               .hint = "zeroth.uneven = \"join\" trains on all of them (ranks without one take part with weight zero), "
                       "\"drop\" ends with the first"});
}

}  // namespace zeroth
