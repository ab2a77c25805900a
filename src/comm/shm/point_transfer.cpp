// Sends and receives between two ranks; see [Note: Rings] in control_block.h.
#include "comm/call_descriptor.h"
#include "comm/shm/shared_memory_engine.h"

#include <zeroth/base/failpoint.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace zeroth::detail {
namespace {

/// Data that the receiver can read is read where it lies instead of flowing through the ring. The sender then has to
/// wait for the receiver.
constexpr std::size_t kDirectBytes = kRingBytes;

std::size_t message_bytes(const Collective& call) {
  return static_cast<std::size_t>(call.counts.front()) * size_of(call.in_dtype);
}

}  // namespace

/// A send or receive in progress.
struct SharedMemoryEngine::Point {
  const Collective& call;
  CallDescriptor own;       ///< what this rank means
  CallDescriptor header{};  ///< what the sender says
  std::size_t header_done = 0;
  std::size_t data_done = 0;
  bool direct = false;
  bool done = false;

  [[nodiscard]] int peer() const { return call.root; }
  [[nodiscard]] bool sends() const { return call.kind == CollectiveKind::kSend; }
  [[nodiscard]] bool header_complete() const { return header_done == sizeof(CallDescriptor); }
};

void SharedMemoryEngine::run_points(std::span<const Collective> calls) {
  std::vector<Point> points;
  std::vector<int> world_ranks;
  for (const Collective& call : calls) {
    const auto peer = static_cast<std::size_t>(call.root);
    const bool sends = call.kind == CollectiveKind::kSend;
    std::uint64_t& sequence = sends ? sent_[peer] : received_[peer];
    if (sends && sequence == 0) {
      held_bytes_ += kRingBytes;
      if (options_.ledger) ring_holds_.push_back(options_.ledger->hold({-1, MemoryState::kControl}, kRingBytes));
    }
    ZR_FAILPOINT_OF("shm.*.start", name_of(call.kind));
    points.push_back({.call = call, .own = describe_call(call, sequence++)});
    Point& point = points.back();
    if (sends && message_bytes(call) > kDirectBytes) {
      Location place = find(call.send, message_bytes(call));
      if (place.window == kPrivateMemory && controls_[peer]->reads_private.load() == 0) place = {};
      point.own.send_window = place.window;
      point.own.send_offset = place.offset;
      point.direct = place.window != -1;
    }
    point.header = point.own;
    world_ranks.push_back(world_ranks_[peer]);
  }
  const auto unfinished = [&] { return std::ranges::find(points, false, &Point::done); };
  const auto context = [&] {
    WaitContext waited;
    for (const Point& point : points) {
      if (!point.done) waited.ranks.push_back(point.peer());
    }
    const auto first = unfinished();
    if (first == points.end()) return waited;
    waited.what = text_of(first->own);
    if (waited.ranks.size() > 1) waited.what += fmt::format(", and {} more", waited.ranks.size() - 1);
    waited.names_ranks = true;
    waited.unit = meaning_of(first->own, tag_names_);
    waited.progress = [first] {
      return fmt::format("{} of {} B {}", first->data_done, message_bytes(first->call),
                         first->sends() ? "sent" : "received");
    };
    return waited;
  };
  peers_->throw_if_aborted(view(), context);
  // Messages between two ranks in one direction go one after the other.
  const auto advance = [&] {
    bool moved = false;
    for (auto point = points.begin(); point != points.end(); ++point) {
      const auto blocks = [&](const Point& earlier) {
        return !earlier.done && earlier.peer() == point->peer() && earlier.sends() == point->sends();
      };
      if (point->done || std::any_of(points.begin(), point, blocks)) continue;
      moved = progress(*point) || moved;
    }
    if (moved) peers_->notify(world_ranks);
    return moved;
  };
  // A wait for each piece: the deadline is of one that does not come, however long the message.
  while (unfinished() != points.end()) peers_->wait(view(), advance, context);
}

bool SharedMemoryEngine::progress(Point& point) {
  const bool moved = point.sends() ? progress_send(point) : progress_recv(point);
  if (!point.done) return moved;
  const std::size_t bytes = point.sends() ? 0 : message_bytes(point.call);
  const CountedAs counted(point.call);
  report({.group = group_,
          .kind = counted.kind,
          .calls = counted.calls,
          .bytes = bytes,
          .far_bytes = nodes_.is_far(rank_, point.call.root) ? bytes : 0,
          .control_bytes = point.sends() ? 0 : sizeof(CallDescriptor)});
  return true;
}

bool SharedMemoryEngine::progress_send(Point& point) {
  const PeerLink& theirs = link(point.peer(), rank_);
  if (theirs.refused.load() != 0) {
    peers_->watched().tell_and_throw(mismatch_error({theirs.offered, rank_}, {theirs.wanted, point.peer()}, size_,
                                                    fmt::format("{} group={}", where_, group_), tag_names_));
  }
  const std::size_t before = point.header_done + point.data_done;
  if (!point.header_complete()) {
    point.header_done += put(point.peer(), std::as_bytes(std::span(&point.header, 1)).subspan(point.header_done));
    ZR_FAILPOINT_OF("shm.*.data", name_of(point.call.kind));
  }
  if (point.header_complete() && !point.direct) {
    const std::span<const std::byte> data(point.call.send, message_bytes(point.call));
    point.data_done += put(point.peer(), data.subspan(point.data_done));
    point.done = point.data_done == data.size();
  } else if (point.header_complete()) {
    point.done = theirs.received.load() > point.own.sequence;
  }
  return point.header_done + point.data_done > before;
}

bool SharedMemoryEngine::progress_recv(Point& point) {
  const std::size_t before = point.header_done + point.data_done;
  if (!point.header_complete()) {
    point.header_done +=
        take(point.peer(), std::as_writable_bytes(std::span(&point.header, 1)).subspan(point.header_done));
    if (point.header_complete()) compare(point);
    ZR_FAILPOINT_OF("shm.*.data", name_of(point.call.kind));
  }
  if (!point.header_complete()) return point.header_done > before;
  const std::span<std::byte> data(point.call.recv, message_bytes(point.call));
  if (point.header.send_window != -1) {
    const CallDescriptor& sent = point.header;
    fetch(data, source_at(point.peer(), sent, sent.send_window, sent.send_offset, data.size()), point.own);
    point.data_done = data.size();
  } else {
    point.data_done += take(point.peer(), data.subspan(point.data_done));
  }
  point.done = point.data_done == data.size();
  if (point.done) link(rank_, point.peer()).received.store(point.own.sequence + 1);
  return point.header_done + point.data_done > before;
}

void SharedMemoryEngine::compare(Point& point) {
  if (same_message(point.header, point.own)) [[likely]]
    return;
  PeerLink& mine = link(rank_, point.peer());
  mine.wanted = point.own;
  mine.offered = point.header;
  mine.refused.store(1);
  notify();
  peers_->watched().tell_and_throw(mismatch_error({point.own, rank_}, {point.header, point.peer()}, size_,
                                                  fmt::format("{} group={}", where_, group_), tag_names_));
}

std::size_t SharedMemoryEngine::in_ring(int from, int to) const {
  const std::uint64_t bytes = link(from, to).filled.load() - link(to, from).taken.load();
  ZR_CHECK(bytes <= kRingBytes, ErrorCode::kInternal,
           fmt::format("the words about messages from rank {} to rank {} are damaged", from, to),
           {.where = fmt::format("{} group={}", where_, group_),
            .who = fmt::format("rank {}/{}", rank_, size_),
            .expected = fmt::format("at most {} bytes on their way", kRingBytes),
            .got = std::to_string(bytes),
            .hint = "something wrote where it should not: run the program under an address sanitizer"});
  return static_cast<std::size_t>(bytes);
}

std::size_t SharedMemoryEngine::put(int peer, std::span<const std::byte> bytes) {
  const std::size_t length = std::min(kRingBytes - in_ring(rank_, peer), bytes.size());
  if (length == 0) return 0;
  SharedWord& filled = link(rank_, peer).filled;
  const std::uint64_t before = filled.load();
  const std::size_t at = before % kRingBytes;
  const std::size_t first = std::min(length, kRingBytes - at);
  std::byte* const ring = ring_towards(rank_, peer);
  // Ordinary copies, not streaming ones: the other rank reads them from the cache.
  std::memcpy(ring + at, bytes.data(), first);
  if (length > first) std::memcpy(ring, bytes.data() + first, length - first);
  filled.store(before + length);
  return length;
}

std::size_t SharedMemoryEngine::take(int peer, std::span<std::byte> bytes) {
  const std::size_t length = std::min(in_ring(peer, rank_), bytes.size());
  if (length == 0) return 0;
  SharedWord& taken = link(rank_, peer).taken;
  const std::uint64_t before = taken.load();
  const std::size_t at = before % kRingBytes;
  const std::size_t first = std::min(length, kRingBytes - at);
  const std::byte* const ring = ring_towards(peer, rank_);
  std::memcpy(bytes.data(), ring + at, first);
  if (length > first) std::memcpy(bytes.data() + first, ring, length - first);
  taken.store(before + length);
  return length;
}

}  // namespace zeroth::detail
