// Large calls from ordinary memory: through the staging areas, in rounds that fit the cache.
//
// [Note: Rounds] A staging area has two halves; round g of all rounds that the group ever makes uses half g
// % 2. A rank fills round g when all others have consumed g - 2, and consumes g when all others have filled
// it. It fills one round ahead, so that two ranks rarely wait for each other. All ranks make the same number
// of rounds in a call, so the counters go on from call to call.
#include "comm/shm/shared_memory_engine.h"

#include <zeroth/base/failpoint.h>

#include <algorithm>
#include <cstring>

namespace zeroth::detail {
namespace {

std::uint64_t rounds_for(std::int64_t total, std::int64_t chunk) {
  return static_cast<std::uint64_t>((total + chunk - 1) / chunk);
}

void stage_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
  // An ordinary copy, not a streaming one: the peer reads it from the cache.
  if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace

const std::byte* SharedMemoryEngine::peer_half(int peer, std::uint64_t round) const {
  return staging_[static_cast<std::size_t>(peer)] + (round % 2) * half_bytes_;
}

/// Room in a half for each of the size - 1 ranks that read another part of it.
std::int64_t SharedMemoryEngine::piece_bytes() const {
  const std::size_t readers = static_cast<std::size_t>(std::max(1, size_ - 1));
  return static_cast<std::int64_t>(half_bytes_ / readers / kCacheLineBytes * kCacheLineBytes);
}

void SharedMemoryEngine::staged_rounds(const Call& call, Rounds rounds,
                                       FunctionRef<void(std::uint64_t, std::byte*)> stage,
                                       FunctionRef<void(std::uint64_t)> consume) {
  const std::uint64_t base = rounds_;
  rounds_ += rounds.count;
  const auto fill = [&](std::uint64_t round) {
    const std::uint64_t global = base + round;
    if (global >= 2) {
      wait_all(call.descriptor,
               [global](const GroupControl& control) { return control.consumed.load() >= global - 1; });
    }
    stage(round, staging_[static_cast<std::size_t>(rank_)] + (global % 2) * half_bytes_);
    own().staged.store(global + 1);
    notify();
  };
  for (std::uint64_t round = 0; round < rounds.count; ++round) {
    if (round == 0 || !rounds.ahead) fill(round);
    if (rounds.ahead && round + 1 < rounds.count) fill(round + 1);
    const std::uint64_t global = base + round;
    wait_all(call.descriptor, [global](const GroupControl& control) { return control.staged.load() > global; });
    ZR_FAILPOINT("shm.staged.round");
    consume(round);
    own().consumed.store(global + 1);
    notify();
  }
}

void SharedMemoryEngine::run_staged(Call& call) {
  switch (call.collective.kind) {
    case CollectiveKind::kGather:
    case CollectiveKind::kAllGather:
      staged_gather(call);
      break;
    case CollectiveKind::kScatter:
      staged_parts(call, parts_of_scatter(call));
      break;
    case CollectiveKind::kReduceScatter:
      staged_reduce_scatter(call);
      break;
    case CollectiveKind::kAllReduce:
      staged_all_reduce(call);
      break;
    case CollectiveKind::kBroadcast:
      staged_broadcast(call);
      break;
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
    case CollectiveKind::kBarrier:
      break;
  }
}

void SharedMemoryEngine::staged_gather(Call& call) {
  const Collective& collective = call.collective;
  const auto element = static_cast<std::int64_t>(size_of(collective.in_dtype));
  const auto chunk = static_cast<std::int64_t>(half_bytes_);
  const auto bytes_of = [&](int rank) { return collective.counts[static_cast<std::size_t>(rank)] * element; };
  const auto place_of = [&](int rank) {
    return collective.recv + call.offsets[static_cast<std::size_t>(rank)] * element;
  };
  const bool to_one = collective.kind == CollectiveKind::kGather;
  const bool reads = !to_one || rank_ == collective.root;
  std::int64_t longest = 0;  // that somebody reads
  for (int rank = 0; rank < size_; ++rank) {
    if (!to_one || rank != collective.root) longest = std::max(longest, bytes_of(rank));
  }
  const std::uint64_t base = rounds_;
  staged_rounds(
      call, {.count = rounds_for(longest, chunk)},
      [&](std::uint64_t round, std::byte* half) {
        const std::int64_t first = static_cast<std::int64_t>(round) * chunk;
        if (!to_one || !reads) stage_bytes(half, collective.send + first, std::min(chunk, bytes_of(rank_) - first));
      },
      [&](std::uint64_t round) {
        const std::int64_t first = static_cast<std::int64_t>(round) * chunk;
        for (int step = 1; reads && step < size_; ++step) {
          const int peer = (rank_ + step) % size_;
          copy_in(place_of(peer) + first, peer_half(peer, base + round), std::min(chunk, bytes_of(peer) - first), peer,
                  call);
        }
      });
}

void SharedMemoryEngine::staged_broadcast(Call& call) {
  const Collective& collective = call.collective;
  const std::int64_t total = call.descriptor.elements * static_cast<std::int64_t>(size_of(collective.in_dtype));
  const auto chunk = static_cast<std::int64_t>(half_bytes_);
  const bool root = rank_ == collective.root;
  const std::uint64_t base = rounds_;
  staged_rounds(
      call, {.count = rounds_for(total, chunk)},
      [&](std::uint64_t round, std::byte* half) {
        const std::int64_t first = static_cast<std::int64_t>(round) * chunk;
        if (root) stage_bytes(half, collective.send + first, std::min(chunk, total - first));
      },
      [&](std::uint64_t round) {
        const std::int64_t first = static_cast<std::int64_t>(round) * chunk;
        if (!root) {
          copy_in(collective.recv + first, peer_half(collective.root, base + round), std::min(chunk, total - first),
                  collective.root, call);
        }
      });
}

void SharedMemoryEngine::staged_reduce_scatter(Call& call) {
  const Collective& collective = call.collective;
  const auto in_size = static_cast<std::int64_t>(size_of(collective.in_dtype));
  const auto out_size = static_cast<std::int64_t>(size_of(collective.out_dtype));
  const std::int64_t stride = piece_bytes();
  const std::int64_t piece = stride / std::max(in_size, out_size);  // the same on all ranks, whatever each gives
  const std::int64_t longest = *std::max_element(collective.counts.begin(), collective.counts.end());
  const auto length = [&](int rank, std::int64_t first) {
    return std::clamp<std::int64_t>(collective.counts[static_cast<std::size_t>(rank)] - first, 0, piece);
  };
  const std::uint64_t base = rounds_;
  staged_rounds(
      call, {.count = rounds_for(longest, piece)},
      [&](std::uint64_t round, std::byte* half) {
        const std::int64_t first = static_cast<std::int64_t>(round) * piece;
        for (int peer = 0; peer < size_; ++peer) {
          if (peer == rank_) continue;
          const std::byte* from = collective.send + (call.offsets[static_cast<std::size_t>(peer)] + first) * in_size;
          stage_bytes(half, from, length(peer, first) * in_size);
          half += stride;
        }
      },
      [&](std::uint64_t round) {
        const std::int64_t first = static_cast<std::int64_t>(round) * piece;
        const std::int64_t elements = length(rank_, first);
        if (elements == 0) return;
        Summands sources;
        for (int peer = 0; peer < size_; ++peer) {
          const DType dtype = in_dtype_of(peer, call);
          const std::byte* const own =
              collective.send + (call.offsets[static_cast<std::size_t>(rank_)] + first) * in_size;
          sources.add(peer == rank_ ? own : peer_half(peer, base + round) + (rank_ - (rank_ > peer ? 1 : 0)) * stride,
                      dtype);
          count(call, peer, elements * static_cast<std::int64_t>(size_of(dtype)));
        }
        reduce(collective, collective.recv + first * out_size, sources, elements);
      });
}

/// [Note: Interleaved all_reduce] Blocks of size * piece elements; each has a reduce round and a gather
/// round. The order of rounds is R0 R1 G0 R2 G1 ... G(last), so that filling one round ahead never needs a
/// sum that is not there yet.
void SharedMemoryEngine::staged_all_reduce(Call& call) {
  const Collective& collective = call.collective;
  const auto in_size = static_cast<std::int64_t>(size_of(collective.in_dtype));
  const auto out_size = static_cast<std::int64_t>(size_of(collective.out_dtype));
  const std::int64_t total = call.descriptor.elements;
  const std::int64_t stride = piece_bytes();
  const std::int64_t piece = stride / std::max(in_size, out_size);
  const std::int64_t block = piece * size_;
  const std::uint64_t blocks = rounds_for(total, block);

  struct Place {
    std::int64_t first;
    std::int64_t elements;
  };
  // Part of a rank in a block; the last block is cut evenly too, in cache lines.
  const auto place = [&](std::uint64_t index, int rank) -> Place {
    constexpr std::int64_t kGrain = 64;
    const std::int64_t begin = static_cast<std::int64_t>(index) * block;
    const std::int64_t length = std::min(block, total - begin);
    const std::int64_t part = std::min(piece, ((length + size_ - 1) / size_ + kGrain - 1) / kGrain * kGrain);
    const std::int64_t first = std::min(length, rank * part);
    return {begin + first, std::min(length, first + part) - first};
  };
  struct Step {
    bool gather;
    std::uint64_t block;
  };
  const auto step_of = [&](std::uint64_t round) -> Step {
    if (round == 0) return {false, 0};
    if (round == 2 * blocks - 1) return {true, blocks - 1};
    return round % 2 == 1 ? Step{false, (round + 1) / 2} : Step{true, round / 2 - 1};
  };
  const std::uint64_t base = rounds_;
  staged_rounds(
      call, {.count = 2 * blocks, .ahead = blocks > 1},
      [&](std::uint64_t round, std::byte* half) {
        const Step step = step_of(round);
        if (step.gather) {
          const Place mine = place(step.block, rank_);
          stage_bytes(half, collective.recv + mine.first * out_size, mine.elements * out_size);
          return;
        }
        for (int peer = 0; peer < size_; ++peer) {
          if (peer == rank_) continue;
          const Place theirs = place(step.block, peer);
          stage_bytes(half, collective.send + theirs.first * in_size, theirs.elements * in_size);
          half += stride;
        }
      },
      [&](std::uint64_t round) {
        const Step step = step_of(round);
        if (step.gather) {
          for (int offset = 1; offset < size_; ++offset) {
            const int peer = (rank_ + offset) % size_;
            const Place theirs = place(step.block, peer);
            copy_in(collective.recv + theirs.first * out_size, peer_half(peer, base + round),
                    theirs.elements * out_size, peer, call);
          }
          return;
        }
        const Place mine = place(step.block, rank_);
        if (mine.elements == 0) return;
        Summands sources;
        for (int peer = 0; peer < size_; ++peer) {
          sources.add(peer == rank_ ? collective.send + mine.first * in_size
                                    : peer_half(peer, base + round) + (rank_ - (rank_ > peer ? 1 : 0)) * stride,
                      collective.in_dtype);
          count(call, peer, mine.elements * in_size);
        }
        // Below the size of streaming stores: the sum is staged next and should still be in the cache then.
        constexpr std::int64_t kCachedBytes = std::int64_t{128} << 10U;
        for (std::int64_t done = 0; done < mine.elements; done += kCachedBytes / out_size) {
          const std::int64_t elements = std::min(mine.elements - done, kCachedBytes / out_size);
          reduce(collective, collective.recv + (mine.first + done) * out_size, sources, elements);
          for (const std::byte*& source : sources.data) source += elements * in_size;
        }
      });
}

}  // namespace zeroth::detail
