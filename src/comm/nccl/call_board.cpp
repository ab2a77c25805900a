#include "comm/nccl/call_board.h"

#include "comm/call_descriptor.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

namespace zeroth::detail {

static_assert(std::is_trivially_copyable_v<CallDescriptor>);

CallBoard::CallBoard(CommBackend& base, std::string where)
    : where_(std::move(where)),
      rank_(base.rank()),
      size_(base.size()),
      arena_(Arena::create(base.capabilities().window_kind, bytes(), "nccl calls")),
      window_(base.attach(arena_, "nccl calls")),
      compared_(static_cast<std::size_t>(base.size()), 0) {}

std::size_t CallBoard::bytes() {
  return align_up(sizeof(Page), kPageBytes);
}

CallBoard::Page& CallBoard::page(int rank) const {
  return *reinterpret_cast<Page*>(window_.ranks[static_cast<std::size_t>(rank)].data());
}

void CallBoard::post(const CallDescriptor& call) {
  std::array<std::uint64_t, kWords> words{};
  std::memcpy(words.data(), &call, sizeof call);
  Page& own = page(rank_);
  Slot& slot = own.slots[call.sequence % kSlots];
  slot.number.store(0);
  for (std::size_t word = 0; word < kWords; ++word) slot.words[word].store(words[word]);
  slot.number.store(call.sequence + 1);
  own.posted.store(call.sequence + 1);
}

std::uint64_t CallBoard::posted(int rank) const {
  return page(rank).posted.load();
}

bool CallBoard::read(int rank, std::uint64_t sequence, CallDescriptor& call) const {
  const Slot& slot = page(rank).slots[sequence % kSlots];
  std::array<std::uint64_t, kWords> words{};
  if (slot.number.load() != sequence + 1) return false;
  for (std::size_t word = 0; word < kWords; ++word) words[word] = slot.words[word].load();
  if (slot.number.load() != sequence + 1) return false;
  std::memcpy(static_cast<void*>(&call), words.data(), sizeof call);
  return true;
}

void CallBoard::compare(std::uint64_t through, const TagNames& names) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    std::uint64_t& next = compared_[static_cast<std::size_t>(peer)];
    const std::uint64_t end = std::min(through, posted(peer));
    for (; next < end; ++next) {
      CallDescriptor own;
      CallDescriptor theirs;
      if (!read(rank_, next, own) || !read(peer, next, theirs)) continue;
      if (!same_call(own, theirs)) throw mismatch_error({own, rank_}, {theirs, peer}, size_, where_, names);
    }
  }
}

void CallBoard::set_open() {
  page(rank_).opened.store(1);
}

bool CallBoard::open(int rank) const {
  return page(rank).opened.load() != 0;
}

}  // namespace zeroth::detail
