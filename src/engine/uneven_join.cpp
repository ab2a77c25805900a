#include "engine/uneven_join.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <algorithm>
#include <iterator>
#include <span>
#include <string>
#include <utility>

namespace zeroth {
namespace {

constexpr unsigned kCallBits = 8;

std::int64_t word_of(Announcement said) {
  return static_cast<std::int64_t>(said.call) | (static_cast<std::int64_t>(said.what) + 1) << kCallBits;
}

Announcement announcement_of(std::int64_t word) {
  return {.call = static_cast<NextCall>(word & ((1 << kCallBits) - 1)),
          .what = static_cast<int>(word >> kCallBits) - 1};
}

bool between_batches(Announcement said) {
  return said.call == NextCall::kBatch || said.call == NextCall::kNoBatch;
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
  static constexpr const char* kNames[] = {"nothing",
                                           "the next batch",
                                           "the end of its batches",
                                           "another epoch",
                                           "the parameters of ",
                                           "the gradients of ",
                                           "backward",
                                           "step()",
                                           "zero_grad()",
                                           "average()",
                                           "barrier()",
                                           "a forward that shares buffers",
                                           "an export",
                                           "close()"};
  const auto index = static_cast<std::size_t>(said.call);
  const std::string name = index < std::size(kNames) ? kNames[index] : "an unknown call";
  if (said.what < 0) return name;
  if (said.call != NextCall::kGather && said.call != NextCall::kReduce)
    return name + " by a name of digest " + std::to_string(said.what);
  const int unit = said.call == NextCall::kReduce ? model_.flat(said.what).unit : said.what;
  return name + "unit " + model_.units[static_cast<std::size_t>(unit)].name;
}

Announcement UnevenJoin::hold(Announcement own) {
  sync_();
  const std::int64_t word = word_of(own);
  std::vector<std::int64_t> words(out_.size());
  communicator_.all_gather(std::span(&word, 1), std::span(words));
  int first = -1;  // who speaks
  Announcement said;
  bool some_have = false;
  std::vector<std::uint8_t> out(out_.size(), 1);
  for (std::size_t rank = 0; rank < words.size(); ++rank) {
    const Announcement theirs = announcement_of(words[rank]);
    if (theirs.call == NextCall::kListen) continue;
    some_have = some_have || theirs.call == NextCall::kBatch;
    out[rank] = theirs.call == NextCall::kNoBatch ? 1 : 0;
    if (first < 0) {
      first = static_cast<int>(rank);
      said = theirs;
    }
    ZR_CHECK(theirs == said || (between_batches(theirs) && between_batches(said)), ErrorCode::kMismatch,
             "ranks that have a batch do not do the same with it",
             {.where = "engine.uneven_join",
              .who = "rank " + std::to_string(communicator_.rank()) + "/" + std::to_string(communicator_.size()),
              .expected = describe(said) + " on rank " + std::to_string(first),
              .got = describe(theirs) + " on rank " + std::to_string(rank),
              .hint = "while some ranks have no batch (zeroth.uneven = \"join\") all others must make the same calls "
                      "in the same order"});
  }
  if (!between_batches(said)) return said;
  out_ = std::move(out);
  num_out_ = 0;
  for (const std::uint8_t is_out : out_) num_out_ += is_out;
  return {.call = some_have ? NextCall::kBatch : NextCall::kNoBatch};
}

void UnevenJoin::begin_batch(bool has_batch) {
  (void)hold({.call = has_batch ? NextCall::kBatch : NextCall::kNoBatch});
}

void UnevenJoin::announce(NextCall call, int what) {
  if (num_out_ == 0 || is_out()) return;
  (void)hold({.call = call, .what = what});
  require_joinable(call);
}

void UnevenJoin::announce_backward() {
  if (!std::exchange(backward_announced_, true)) announce(NextCall::kBackward);
}

void UnevenJoin::require_joinable(NextCall call) const {
  if (call != NextCall::kExport && call != NextCall::kClose) return;
  throw Error(
      ErrorCode::kUsage, "a call of all ranks while some have no batch and wait for the others",
      {.where = "engine.next_batch",
       .who = "rank " + std::to_string(communicator_.rank()) + "/" + std::to_string(communicator_.size()),
       .which = call == NextCall::kExport ? "an export" : "close()",
       .expected =
           "forward, backward, step(), zero_grad(), average() or barrier() until the batches of all ranks are used up",
       .got = ranks_text(out()) + " without a batch",
       .hint = "make it after the loop over the batches"});
}

Announcement UnevenJoin::listen() {
  return hold({});
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
