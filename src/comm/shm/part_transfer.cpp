// Scatter and all_to_all: each rank reads another part of a sender's buffer.
//
// [Note: Counts of an all_to_all] A rank knows what it gives to each and takes from each, not what others give to
// others. So it posts its counts and recv_counts, and behind them its data, if there is room. From all posts every rank
// checks all pairs, and judges like all others by which way the data goes.
#include "comm/call_descriptor.h"
#include "comm/shm/shared_memory_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace zeroth::detail {
namespace {

/// Of counts and recv_counts in a post.
std::size_t counts_bytes(int size) {
  return 2 * static_cast<std::size_t>(size) * sizeof(std::int64_t);
}

void set_begins(std::vector<std::int64_t>& offsets, const std::vector<std::int64_t>& counts) {
  offsets.resize(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), std::int64_t{0});
}

}  // namespace

PartTable SharedMemoryEngine::parts_of_scatter(const Call& call) const {
  const Collective& collective = call.collective;
  const auto ranks = static_cast<std::size_t>(size_);
  const auto root = static_cast<std::size_t>(collective.root);
  const auto own = static_cast<std::size_t>(rank_);
  const std::vector<std::int64_t> none(ranks, 0);
  PartTable parts{.given = rank_ == collective.root ? collective.counts : none,
                  .given_offset = {},
                  .taken = none,
                  .source_offset = none,
                  .taken_offset = none,
                  .longest = 0};
  set_begins(parts.given_offset, collective.counts);
  parts.taken[root] = collective.counts[own];
  parts.source_offset[root] = call.offsets[own];
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (rank != root) parts.longest = std::max(parts.longest, collective.counts[rank]);
  }
  return parts;
}

const PartTable& SharedMemoryEngine::parts_of_all_to_all(const Call& call) {
  const Collective& collective = call.collective;
  const std::size_t element = size_of(collective.in_dtype);
  const auto ranks = static_cast<std::size_t>(size_);
  const auto own = static_cast<std::size_t>(rank_);
  // Each rank's counts, then its recv_counts; and for these vectors the memory of the last call.
  std::vector<std::int64_t>& posted = all_to_all_.posted;
  posted.resize(2 * ranks * ranks);
  for (std::size_t peer = 0; peer < ranks; ++peer) {
    std::memcpy(posted.data() + 2 * ranks * peer, slot_of(static_cast<int>(peer), call.descriptor.sequence).payload,
                counts_bytes(size_));
  }
  const auto given = [&](std::size_t from, std::size_t to) { return posted[2 * ranks * from + to]; };
  const auto taken = [&](std::size_t from, std::size_t to) { return posted[2 * ranks * to + ranks + from]; };
  PartTable& parts = all_to_all_.parts;
  parts.given = collective.counts;
  parts.taken = collective.recv_counts;
  set_begins(parts.given_offset, parts.given);
  set_begins(parts.taken_offset, parts.taken);
  parts.source_offset.assign(ranks, 0);
  parts.longest = 0;
  parts.fits_posts = true;
  for (std::size_t from = 0; from < ranks; ++from) {
    std::int64_t total = 0;
    for (std::size_t to = 0; to < ranks; ++to) {
      const PartSize part{static_cast<int>(from), static_cast<int>(to), given(from, to), taken(from, to)};
      if (part.given != part.taken || part.given < 0) {
        throw parts_error(call.descriptor, part, rank_, size_, fmt::format("{} group={}", where_, group_), tag_names_);
      }
      if (to == own) parts.source_offset[from] = total;
      total += part.given;
      if (from != to) parts.longest = std::max(parts.longest, part.given);
    }
    if (counts_bytes(size_) + static_cast<std::size_t>(total) * element > kInlineBytes) parts.fits_posts = false;
  }
  return parts;
}

void SharedMemoryEngine::all_to_all(Call& call) {
  const Collective& collective = call.collective;
  const std::size_t table_bytes = counts_bytes(size_);
  ZR_CHECK(table_bytes <= kInlineBytes, ErrorCode::kUsage, "too many ranks share memory for an all_to_all",
           {.where = fmt::format("{} group={}", where_, group_),
            .expected = fmt::format("at most {}", kInlineBytes / counts_bytes(1)),
            .got = std::to_string(size_)});
  std::vector<std::int64_t>& table = all_to_all_.table;
  table = collective.counts;
  table.insert(table.end(), collective.recv_counts.begin(), collective.recv_counts.end());
  const std::size_t element = size_of(collective.in_dtype);
  const std::span<const std::byte> data(collective.send, static_cast<std::size_t>(call.descriptor.elements) * element);
  const std::span<const std::byte> counts = std::as_bytes(std::span(table));
  locate(call);
  if (table_bytes + data.size() > kInlineBytes) {
    post(call.descriptor, {{.bytes = counts}});
  } else {  // what a rank keeps for itself stays out
    const auto own = collective.counts.begin() + rank_;
    const auto before =
        static_cast<std::size_t>(std::accumulate(collective.counts.begin(), own, std::int64_t{0})) * element;
    const std::size_t after = before + static_cast<std::size_t>(*own) * element;
    post(call.descriptor,
         {{.bytes = counts}, {table_bytes, data.first(before)}, {table_bytes + after, data.subspan(after)}});
  }
  keep_own_part(call);
  await_posts(call.descriptor);
  const PartTable& parts = parts_of_all_to_all(call);
  if (parts.fits_posts) {
    inline_parts(call, parts, table_bytes);
  } else if (is_direct(call)) {
    direct_parts(call, parts);
    await_readers(call);
  } else {
    staged_parts(call, parts);
  }
}

void SharedMemoryEngine::inline_parts(Call& call, const PartTable& parts, std::size_t payload_offset) {
  const Collective& collective = call.collective;
  const auto element = static_cast<std::int64_t>(size_of(collective.in_dtype));
  for (int peer = 0; peer < size_; ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    const auto bytes = static_cast<std::size_t>(parts.taken[index] * element);
    if (peer == rank_ || bytes == 0) continue;
    const std::byte* const payload = slot_of(peer, call.descriptor.sequence).payload + payload_offset;
    std::memcpy(collective.recv + parts.taken_offset[index] * element, payload + parts.source_offset[index] * element,
                bytes);
    count(call, peer, parts.taken[index] * element);
  }
}

void SharedMemoryEngine::direct_parts(Call& call, const PartTable& parts) {
  const Collective& collective = call.collective;
  const auto element = static_cast<std::int64_t>(size_of(collective.in_dtype));
  for (int step = 1; step < size_; ++step) {  // each rank starts with another source
    const int peer = (rank_ + step) % size_;
    const auto index = static_cast<std::size_t>(peer);
    const std::int64_t bytes = parts.taken[index] * element;
    if (bytes == 0) continue;
    pull(collective.recv + parts.taken_offset[index] * element,
         source_of(peer, false, parts.source_offset[index] * element, bytes), bytes, call);
  }
}

void SharedMemoryEngine::staged_parts(Call& call, const PartTable& parts) {
  const Collective& collective = call.collective;
  const auto element = static_cast<std::int64_t>(size_of(collective.in_dtype));
  const std::int64_t stride = piece_bytes();
  const std::int64_t piece = stride / element;
  const auto length = [piece](std::int64_t elements, std::int64_t first) {
    return std::clamp<std::int64_t>(elements - first, 0, piece);
  };
  const std::uint64_t base = rounds_;
  staged_rounds(
      call, {.count = static_cast<std::uint64_t>((parts.longest + piece - 1) / piece)},
      [&](std::uint64_t round, std::byte* half) {
        const std::int64_t first = static_cast<std::int64_t>(round) * piece;
        for (int peer = 0; peer < size_; ++peer) {
          if (peer == rank_) continue;
          const auto index = static_cast<std::size_t>(peer);
          const std::int64_t bytes = length(parts.given[index], first) * element;
          // An ordinary copy, not a streaming one: the peer reads it from the cache.
          if (bytes > 0) {
            std::memcpy(half, collective.send + (parts.given_offset[index] + first) * element,
                        static_cast<std::size_t>(bytes));
          }
          half += stride;
        }
      },
      [&](std::uint64_t round) {
        const std::int64_t first = static_cast<std::int64_t>(round) * piece;
        for (int step = 1; step < size_; ++step) {
          const int peer = (rank_ + step) % size_;
          const auto index = static_cast<std::size_t>(peer);
          if (length(parts.taken[index], first) == 0) continue;
          copy_in(collective.recv + (parts.taken_offset[index] + first) * element,
                  peer_half(peer, base + round) + (rank_ - (rank_ > peer ? 1 : 0)) * stride,
                  length(parts.taken[index], first) * element, peer, call);
        }
      });
}

}  // namespace zeroth::detail
