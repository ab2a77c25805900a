// Large calls whose buffers peers can read where they lie: in attached arenas, or in private memory.
#include "comm/call_descriptor.h"
#include "comm/shm/shared_memory_engine.h"

#include <kernels/copy/copy.h>
#include <zeroth/base/failpoint.h>
#include <zeroth/comm/rank_activity.h>

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

SharedMemoryEngine::Location SharedMemoryEngine::find(const std::byte* data, std::uint64_t bytes) const {
  for (std::size_t index = 0; index < windows_.size(); ++index) {
    const std::span<std::byte> own = windows_[index].own;
    if (data < own.data() || data + bytes > own.data() + own.size()) continue;
    return {.window = static_cast<std::int32_t>(index), .offset = static_cast<std::uint64_t>(data - own.data())};
  }
  if (private_) return {.window = kPrivateMemory, .offset = reinterpret_cast<std::uintptr_t>(data)};
  return {};
}

void SharedMemoryEngine::locate(Call& call) const {
  if (windows_.empty() && !private_) return;
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
                           : find(collective.send, elements * size_of(collective.in_dtype));
      break;
    }
    case CollectiveKind::kScatter:
    case CollectiveKind::kBroadcast:
      if (rank_ == collective.root) send = find(collective.send, total * size_of(collective.in_dtype));
      break;
    case CollectiveKind::kAllReduce:
      recv = find(collective.recv, total * size_of(collective.out_dtype));
      [[fallthrough]];
    case CollectiveKind::kReduceScatter:
      send = find(collective.send, total * size_of(collective.in_dtype));
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
  const bool reads_private = all_read_private();
  const auto is_readable = [&](std::int32_t window) {
    return window >= 0 || (window == kPrivateMemory && reads_private);
  };
  if (kind == CollectiveKind::kBroadcast || kind == CollectiveKind::kScatter) {
    return is_readable(slot_of(call.collective.root, sequence).descriptor.send_window);
  }
  const bool reads_result = kind == CollectiveKind::kAllReduce;
  for (int peer = 0; peer < size_; ++peer) {
    if (kind == CollectiveKind::kGather && peer == call.collective.root) continue;  // nobody reads the root's
    const CallDescriptor& theirs = slot_of(peer, sequence).descriptor;
    if (!is_readable(theirs.send_window) || (reads_result && !is_readable(theirs.recv_window))) return false;
  }
  return true;
}

bool SharedMemoryEngine::all_read_private() const {
  return private_ &&
         std::ranges::all_of(controls_, [](const GroupControl* control) { return control->reads_private.load() != 0; });
}

SharedMemoryEngine::Source SharedMemoryEngine::source_of(int peer, bool recv, std::int64_t first_byte,
                                                         std::int64_t bytes) const {
  // Posted for the call in progress, which is the last one that this rank posted.
  const CallDescriptor& theirs = slot_of(peer, next_sequence_ - 1).descriptor;
  const std::uint64_t offset =
      (recv ? theirs.recv_offset : theirs.send_offset) + static_cast<std::uint64_t>(first_byte);
  return source_at(peer, theirs, recv ? theirs.recv_window : theirs.send_window, offset,
                   static_cast<std::uint64_t>(bytes));
}

SharedMemoryEngine::Source SharedMemoryEngine::source_at(int peer, const CallDescriptor& theirs, std::int32_t window,
                                                         std::uint64_t offset, std::uint64_t length) const {
  if (window == kPrivateMemory && private_) return {.peer = peer, .there = offset};
  return {.peer = peer, .here = window_bytes(peer, theirs, window, offset, length)};
}

void SharedMemoryEngine::read_private(std::span<std::byte> to, const Source& from, const CallDescriptor& call) {
  const int refused = private_->read(from.peer, to, from.there);
  if (refused == 0) [[likely]]
    return;
  // A rank that has ended, or has left the call and given its memory back, is why: the others hear of it within a
  // moment.
  const Deadline deadline(WatchedWait::kLastWord);
  wait_for(from.peer, call, [&] { return deadline.passed(); });
  throw Error(ErrorCode::kResource,
              fmt::format("rank {}'s memory cannot be read any more: {}", from.peer, errno_text(refused)),
              {.where = fmt::format("{} group={}", where_, group_),
               .who = fmt::format("rank {}/{}", rank_, size_),
               .which = text_of(call),
               .expected = "a buffer that stays where it is until the call ends",
               .got = fmt::format("process_vm_readv of {} bytes", to.size()),
               .hint = "does a thread of that rank free the buffer, or give up its right to be read "
                       "(prctl(PR_SET_DUMPABLE)), during the call?"});
}

void SharedMemoryEngine::fetch(std::span<std::byte> to, const Source& from, const CallDescriptor& call) {
  if (from.here == nullptr) return read_private(to, from, call);
  kernels::copy_stream(to.data(), from.here, static_cast<std::int64_t>(to.size()), isa_);
}

void SharedMemoryEngine::pull(std::byte* to, const Source& from, std::int64_t bytes, Call& call) {
  if (bytes <= 0) return;
  fetch({to, static_cast<std::size_t>(bytes)}, from, call.descriptor);
  count(call, from.peer, bytes);
}

// Where peers' elements have to be fetched, a piece of each is, into this rank's staging area: no rank reads that one
// during a direct call, because all have posted the call, and so have taken what the calls before it left there.
void SharedMemoryEngine::reduce_direct(Call& call, std::byte* to, std::int64_t first, std::int64_t elements) {
  if (elements == 0) return;
  const Collective& collective = call.collective;
  std::vector<Source> sources;
  std::int64_t piece = elements;
  const auto room = static_cast<std::int64_t>(2 * half_bytes_) / std::max(1, size_ - 1) /
                    static_cast<std::int64_t>(kCacheLineBytes) * static_cast<std::int64_t>(kCacheLineBytes);
  for (int peer = 0; peer < size_; ++peer) {
    const auto element = static_cast<std::int64_t>(size_of(in_dtype_of(peer, call)));
    sources.push_back(peer == rank_ ? Source{.peer = peer, .here = collective.send + first * element}
                                    : source_of(peer, false, first * element, elements * element));
    if (sources.back().here == nullptr) piece = std::min(piece, room / element);
    count(call, peer, elements * element);
  }
  const auto out_size = static_cast<std::int64_t>(size_of(collective.out_dtype));
  for (std::int64_t done = 0; done < elements; done += piece) {
    const std::int64_t now = std::min(piece, elements - done);
    std::byte* fetched = staging_[static_cast<std::size_t>(rank_)];
    Summands summands;
    for (const Source& source : sources) {
      const DType dtype = in_dtype_of(source.peer, call);
      const auto element = static_cast<std::int64_t>(size_of(dtype));
      if (source.here != nullptr) {
        summands.add(source.here + done * element, dtype);
        continue;
      }
      read_private({fetched, static_cast<std::size_t>(now * element)},
                   {.peer = source.peer, .there = source.there + static_cast<std::uint64_t>(done * element)},
                   call.descriptor);
      summands.add(fetched, dtype);
      fetched += room;
    }
    reduce(collective, to + done * out_size, summands, now);
  }
}

const std::byte* SharedMemoryEngine::window_bytes(int peer, const CallDescriptor& theirs, std::int32_t window,
                                                  std::uint64_t offset, std::uint64_t length) const {
  const auto index = static_cast<std::size_t>(window);
  const auto context = [&](std::string expected, std::string got) {
    return ErrorContext{.where = fmt::format("{} group={}", where_, group_),
                        .who = fmt::format("rank {}/{}", rank_, size_),
                        .which = text_of(theirs),
                        .expected = std::move(expected),
                        .got = std::move(got),
                        .hint = "all ranks must attach the same arenas in the same order"};
  };
  ZR_CHECK(window >= 0 && index < windows_.size(), ErrorCode::kMismatch,
           fmt::format("rank {} names an arena that is not attached", peer),
           context(fmt::format("one of {} attached arenas", windows_.size()), fmt::format("arena {}", window)));
  const std::span<std::byte> bytes_there = windows_[index].window.ranks[static_cast<std::size_t>(peer)];
  ZR_CHECK(offset <= bytes_there.size() && length <= bytes_there.size() - offset, ErrorCode::kMismatch,
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
  notify();
  wait_all(call.descriptor, [done](const GroupControl& control) { return control.finished.load() >= done; });
}

void SharedMemoryEngine::direct_gather(Call& call) {
  const Collective& collective = call.collective;
  const auto element = static_cast<std::int64_t>(size_of(collective.in_dtype));
  for (int step = 1; step < size_; ++step) {  // each rank starts with another source
    const int peer = (rank_ + step) % size_;
    const auto index = static_cast<std::size_t>(peer);
    const std::int64_t bytes = collective.counts[index] * element;
    if (bytes > 0) pull(collective.recv + call.offsets[index] * element, source_of(peer, false, 0, bytes), bytes, call);
  }
}

void SharedMemoryEngine::direct_broadcast(Call& call) {
  const Collective& collective = call.collective;
  const std::int64_t bytes = call.descriptor.elements * static_cast<std::int64_t>(size_of(collective.in_dtype));
  if (rank_ != collective.root) pull(collective.recv, source_of(collective.root, false, 0, bytes), bytes, call);
}

void SharedMemoryEngine::direct_reduce_scatter(Call& call) {
  const auto index = static_cast<std::size_t>(rank_);
  reduce_direct(call, call.collective.recv, call.offsets[index], call.collective.counts[index]);
}

/// Reduces the own part, tells the others, and pulls theirs. In place: a part of a rank's buffer is
/// overwritten only after its owner has read it, because the owner announces its part when it has finished
/// with everybody's.
void SharedMemoryEngine::direct_all_reduce(Call& call) {
  const Collective& collective = call.collective;
  const auto out_size = static_cast<std::int64_t>(size_of(collective.out_dtype));
  const std::int64_t total = call.descriptor.elements;
  const std::int64_t part = part_elements(total, size_);
  const auto first_of = [&](int rank) { return std::min(total, rank * part); };
  const std::int64_t first = first_of(rank_);
  reduce_direct(call, collective.recv + first * out_size, first, first_of(rank_ + 1) - first);
  const std::uint64_t done = call.descriptor.sequence + 1;
  own().reduced.store(done);
  notify();
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    const std::int64_t theirs = first_of(peer);
    const std::int64_t bytes = (first_of(peer + 1) - theirs) * out_size;
    const SharedWord& reduced = controls_[static_cast<std::size_t>(peer)]->reduced;
    wait_for(peer, call.descriptor, [&] { return reduced.load() >= done; });
    if (bytes > 0)
      pull(collective.recv + theirs * out_size, source_of(peer, true, theirs * out_size, bytes), bytes, call);
  }
}

}  // namespace zeroth::detail
