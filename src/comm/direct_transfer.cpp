// Large calls whose buffers lie in attached arenas: peers read them in place.
#include "comm/call_descriptor.h"
#include "comm/shared_memory_engine.h"

#include <kernels/copy/copy.h>
#include <zeroth/base/failpoint.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace zeroth::detail {
namespace {

/// Elements of each rank's part of an all_reduce, so that parts start at cache lines.
std::int64_t part_elements(std::int64_t total, int size) {
  constexpr std::int64_t kGrain = 64;
  const std::int64_t part = (total + size - 1) / size;
  return (part + kGrain - 1) / kGrain * kGrain;
}

}  // namespace

SharedMemoryEngine::Location SharedMemoryEngine::find_window(const std::byte* data,
                                                             std::uint64_t bytes) const {
  for (std::size_t index = 0; index < windows_.size(); ++index) {
    const std::span<std::byte> own = windows_[index].own;
    if (data < own.data() || data + bytes > own.data() + own.size()) continue;
    return {.window = static_cast<std::int32_t>(index),
            .offset = static_cast<std::uint64_t>(data - own.data())};
  }
  return {};
}

void SharedMemoryEngine::locate(Call& call) const {
  if (windows_.empty()) return;
  const Collective& collective = call.collective;
  const auto total = static_cast<std::uint64_t>(call.descriptor.elements);
  Location send;
  Location recv;
  switch (collective.kind) {
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kGather:
    case CollectiveKind::kAllGather: {
      const auto elements = static_cast<std::uint64_t>(extent_of(collective, rank_).send);
      // Where there is nothing to read, any window will do.
      send = elements == 0 ? Location{.window = 0, .offset = 0}
                           : find_window(collective.send, elements * size_of(collective.in_dtype));
      break;
    }
    case CollectiveKind::kScatter:
    case CollectiveKind::kBroadcast:
      if (rank_ == collective.root) send = find_window(collective.send, total * size_of(collective.in_dtype));
      break;
    case CollectiveKind::kAllReduce:
      recv = find_window(collective.recv, total * size_of(collective.out_dtype));
      [[fallthrough]];
    case CollectiveKind::kReduceScatter:
      send = find_window(collective.send, total * size_of(collective.in_dtype));
      break;
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
      break;
    case CollectiveKind::kBarrier:
      return;  // its descriptor holds a name there
  }
  call.descriptor.send_window = send.window;
  call.descriptor.send_offset = send.offset;
  call.descriptor.recv_window = recv.window;
  call.descriptor.recv_offset = recv.offset;
}

bool SharedMemoryEngine::is_direct(const Call& call) const {
  const std::uint64_t sequence = call.descriptor.sequence;
  const CollectiveKind kind = call.collective.kind;
  if (kind == CollectiveKind::kBroadcast || kind == CollectiveKind::kScatter) {
    return slot_of(call.collective.root, sequence).descriptor.send_window >= 0;
  }
  const bool reads_result = kind == CollectiveKind::kAllReduce;
  for (int peer = 0; peer < size_; ++peer) {
    if (kind == CollectiveKind::kGather && peer == call.collective.root) continue;  // nobody reads the root's
    const CallDescriptor& theirs = slot_of(peer, sequence).descriptor;
    if (theirs.send_window < 0 || (reads_result && theirs.recv_window < 0)) return false;
  }
  return true;
}

const std::byte* SharedMemoryEngine::peer_data(int peer,
                                               bool recv,
                                               std::int64_t first_byte,
                                               std::int64_t bytes) const {
  // Posted for the call in progress, which is the last one that this rank posted.
  const CallDescriptor& theirs = slot_of(peer, next_sequence_ - 1).descriptor;
  const std::int32_t window = recv ? theirs.recv_window : theirs.send_window;
  const std::uint64_t offset =
      (recv ? theirs.recv_offset : theirs.send_offset) + static_cast<std::uint64_t>(first_byte);
  return window_bytes(peer, theirs, window, offset, static_cast<std::uint64_t>(bytes));
}

const std::byte* SharedMemoryEngine::window_bytes(
    int peer, const CallDescriptor& theirs, std::int32_t window, std::uint64_t offset, std::uint64_t length) const {
  const auto index = static_cast<std::size_t>(window);
  const auto context = [&](std::string expected, std::string got) {
    return ErrorContext{.where = fmt::format("{} group={}", where_, group_),
                        .who = fmt::format("rank {}/{}", rank_, size_),
                        .which = text_of(theirs),
                        .expected = std::move(expected),
                        .got = std::move(got),
                        .hint = "all ranks must attach the same arenas in the same order"};
  };
  ZR_CHECK(
      window >= 0 && index < windows_.size(),
      ErrorCode::kMismatch,
      fmt::format("rank {} names an arena that is not attached", peer),
      context(fmt::format("one of {} attached arenas", windows_.size()), fmt::format("arena {}", window)));
  const std::span<std::byte> bytes_there = windows_[index].window.ranks[static_cast<std::size_t>(peer)];
  ZR_CHECK(offset <= bytes_there.size() && length <= bytes_there.size() - offset,
           ErrorCode::kMismatch,
           fmt::format("rank {} names bytes outside its attached arena", peer),
           context(fmt::format("bytes of arena {}, which has {}", window, bytes_there.size()),
                   fmt::format("{} bytes at {}", length, offset)));
  return bytes_there.data() + offset;
}

void SharedMemoryEngine::run_direct(Call& call) {
  ZR_FAILPOINT("shm.direct.read");
  switch (call.collective.kind) {
    case CollectiveKind::kGather:
      if (rank_ == call.collective.root) direct_gather(call);
      break;
    case CollectiveKind::kAllGather:
      direct_gather(call);
      break;
    case CollectiveKind::kScatter:
      direct_parts(call, parts_of_scatter(call));
      break;
    case CollectiveKind::kReduceScatter:
      direct_reduce_scatter(call);
      break;
    case CollectiveKind::kAllReduce:
      direct_all_reduce(call);
      break;
    case CollectiveKind::kBroadcast:
      direct_broadcast(call);
      break;
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
    case CollectiveKind::kBarrier:
      break;
  }
  await_readers(call);
}

void SharedMemoryEngine::await_readers(const Call& call) {
  // Only when nobody reads our buffers any more may the caller write them.
  const std::uint64_t done = call.descriptor.sequence + 1;
  own().finished.store(done);
  ring();
  wait_all(call.descriptor, [done](const GroupControl& control) { return control.finished.load() >= done; });
}

void SharedMemoryEngine::direct_gather(Call& call) {
  const Collective& collective = call.collective;
  const auto element = static_cast<std::int64_t>(size_of(collective.in_dtype));
  for (int step = 0; step < size_; ++step) {  // each rank starts with another source
    const int peer = (rank_ + step) % size_;
    const auto index = static_cast<std::size_t>(peer);
    const std::int64_t bytes = collective.counts[index] * element;
    std::byte* to = collective.recv + call.offsets[index] * element;
    if (peer != rank_) {
      if (bytes > 0) copy_in(to, peer_data(peer, false, 0, bytes), bytes, peer, call);
    } else if (to != collective.send) {
      kernels::copy_stream(to, collective.send, bytes, isa_);
    }
  }
}

void SharedMemoryEngine::direct_broadcast(Call& call) {
  const Collective& collective = call.collective;
  const std::int64_t bytes =
      call.descriptor.elements * static_cast<std::int64_t>(size_of(collective.in_dtype));
  if (rank_ != collective.root) {
    copy_in(collective.recv, peer_data(collective.root, false, 0, bytes), bytes, collective.root, call);
  } else if (collective.recv != collective.send) {
    kernels::copy_stream(collective.recv, collective.send, bytes, isa_);
  }
}

void SharedMemoryEngine::direct_reduce_scatter(Call& call) {
  const Collective& collective = call.collective;
  const auto index = static_cast<std::size_t>(rank_);
  const std::int64_t elements = collective.counts[index];
  if (elements == 0) return;
  Summands sources;
  for (int peer = 0; peer < size_; ++peer) {
    const DType dtype = in_dtype_of(peer, call);
    const auto element = static_cast<std::int64_t>(size_of(dtype));
    const std::int64_t first = call.offsets[index] * element;
    sources.add(peer == rank_ ? collective.send + first : peer_data(peer, false, first, elements * element), dtype);
    count(call, peer, elements * element);
  }
  reduce(collective, collective.recv, sources, elements);
}

/// Reduces the own part, tells the others, and pulls theirs. In place: a part of a rank's buffer is
/// overwritten only after its owner has read it, because the owner announces its part when it has finished
/// with everybody's.
void SharedMemoryEngine::direct_all_reduce(Call& call) {
  const Collective& collective = call.collective;
  const auto in_size = static_cast<std::int64_t>(size_of(collective.in_dtype));
  const auto out_size = static_cast<std::int64_t>(size_of(collective.out_dtype));
  const std::int64_t total = call.descriptor.elements;
  const std::int64_t part = part_elements(total, size_);
  const auto first_of = [&](int rank) { return std::min(total, rank * part); };
  const std::int64_t first = first_of(rank_);
  const std::int64_t elements = first_of(rank_ + 1) - first;
  if (elements > 0) {
    Summands sources;
    for (int peer = 0; peer < size_; ++peer) {
      sources.add(peer == rank_ ? collective.send + first * in_size : peer_data(peer, false, first * in_size, elements * in_size),
                  collective.in_dtype);
      count(call, peer, elements * in_size);
    }
    reduce(collective, collective.recv + first * out_size, sources, elements);
  }
  const std::uint64_t done = call.descriptor.sequence + 1;
  own().reduced.store(done);
  ring();
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    const std::int64_t theirs = first_of(peer);
    const std::int64_t bytes = (first_of(peer + 1) - theirs) * out_size;
    const SharedWord& reduced = controls_[static_cast<std::size_t>(peer)]->reduced;
    wait_for(peer, call.descriptor, [&] { return reduced.load() >= done; });
    if (bytes > 0)
      copy_in(
          collective.recv + theirs * out_size, peer_data(peer, true, theirs * out_size, bytes), bytes, peer, call);
  }
}

}  // namespace zeroth::detail
