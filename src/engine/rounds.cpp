#include "engine/rounds.h"

#include <zeroth/base/error.h>

#include <iterator>
#include <span>
#include <utility>

namespace zeroth {
namespace {

constexpr unsigned kTurnBits = 8;

std::int64_t word_of(Announcement said) {
  return static_cast<std::int64_t>(said.turn) | (static_cast<std::int64_t>(said.what) + 1) << kTurnBits;
}

Announcement announcement_of(std::int64_t word) {
  return {.turn = static_cast<Turn>(word & ((1 << kTurnBits) - 1)), .what = static_cast<int>(word >> kTurnBits) - 1};
}

bool between_batches(Announcement said) {
  return said.turn == Turn::kBatch || said.turn == Turn::kNoBatch;
}

}  // namespace

std::vector<int> Rounds::out() const {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < out_.size(); ++rank) {
    if (out_[rank] != 0) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

std::string Rounds::describe(Announcement said) const {
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
  const auto index = static_cast<std::size_t>(said.turn);
  const std::string name = index < std::size(kNames) ? kNames[index] : "an unknown call";
  if (said.what < 0) return name;
  if (said.turn != Turn::kGather && said.turn != Turn::kReduce)
    return name + " by a name of digest " + std::to_string(said.what);
  const int unit = said.turn == Turn::kReduce ? model_.flat(said.what).unit : said.what;
  return name + "unit " + model_.units[static_cast<std::size_t>(unit)].name;
}

Announcement Rounds::hold(Announcement own) {
  meet_();
  const std::int64_t word = word_of(own);
  std::vector<std::int64_t> words(out_.size());
  communicator_.all_gather(std::span(&word, 1), std::span(words));
  int first = -1;  // who speaks
  Announcement said;
  bool some_have = false;
  std::vector<std::uint8_t> out(out_.size(), 1);
  for (std::size_t rank = 0; rank < words.size(); ++rank) {
    const Announcement theirs = announcement_of(words[rank]);
    if (theirs.turn == Turn::kListen) continue;
    some_have = some_have || theirs.turn == Turn::kBatch;
    out[rank] = theirs.turn == Turn::kNoBatch ? 1 : 0;
    if (first < 0) {
      first = static_cast<int>(rank);
      said = theirs;
    }
    ZR_CHECK(theirs == said || (between_batches(theirs) && between_batches(said)), ErrorCode::kMismatch,
             "ranks that have a batch do not do the same with it",
             {.where = "engine.rounds",
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
  return {.turn = some_have ? Turn::kBatch : Turn::kNoBatch};
}

void Rounds::begin_batch(bool has_batch) {
  (void)hold({.turn = has_batch ? Turn::kBatch : Turn::kNoBatch});
}

void Rounds::announce(Announcement next) {
  (void)hold(next);
}

Announcement Rounds::listen() {
  return hold({});
}

void Rounds::end() {
  out_.assign(out_.size(), 0);
  num_out_ = 0;
}

}  // namespace zeroth
