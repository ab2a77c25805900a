// Collective: one call of a group, as a value. It can be counted, compared between ranks, delayed, failed and
// replayed.
#pragma once

#include <zeroth/base/dtype.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

enum class CollectiveKind : std::uint8_t { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kBarrier };
inline constexpr std::size_t kNumCollectiveKinds = 5;

/// "all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier".
[[nodiscard]] std::string_view name_of(CollectiveKind kind) noexcept;

/// What a message is about. Ranks compare it, so that two calls of equal shape that changed places are an
/// error, not wrong data.
struct MessageTag {
  std::int32_t unit = -1;   ///< index of the unit, -1: none
  std::uint32_t label = 0;  ///< meaning is the caller's: a phase, a step
  bool operator==(const MessageTag&) const = default;
};

/// One matched call. Every rank of the group makes the same calls in the same order with the same kind,
/// dtypes, counts, root, tag.
///
///   kind            counts                  send                        recv
///   all_gather      elements of each rank   own part, counts[rank]      all parts in rank order, sum(counts)
///   reduce_scatter  elements of each rank   all parts, sum(counts)      own part of the sum, counts[rank]
///   all_reduce      {n}                     n                           n
///   broadcast       {n}                     n at the root, else unused  n (at the root too; may be equal to
///   send) barrier         {}                      -                           -
///
/// Reductions SUM, strictly in rank order ((s0 + s1) + s2) ..., in fp64 for fp64, fp32 for fp32 and bf16 (one
/// rounding at the end), wrapping for integers; all_reduce gives the bits of reduce_scatter followed by
/// all_gather. Reductions take fp64, fp32, bf16, int64, int32, with out_dtype == in_dtype or bf16 -> fp32 or
/// fp32 -> bf16; the others take every dtype, out_dtype == in_dtype. In a reduce_scatter to fp32 each rank gives
/// fp32 or bf16, whatever the others give, with the bits of fp32 from all. In place: all_gather with send at its
/// place inside recv, reduce_scatter with recv at its place inside send, all_reduce and broadcast with send
/// == recv. Any other overlap is an error.
struct Collective {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType in_dtype = DType::kUInt8;
  DType out_dtype = DType::kUInt8;
  const std::byte* send = nullptr;
  std::byte* recv = nullptr;
  std::vector<std::int64_t> counts{};  ///< elements
  int root = 0;                        ///< broadcast only
  bool accumulate = false;             ///< reduce_scatter only, not in place: recv = recv + sum; this rank's own matter
  MessageTag tag{};
};

/// "all_gather float32 [8, 8, 7] unit=3 label=0".
[[nodiscard]] std::string describe(const Collective& collective);

/// Throws kUsage with `where` for what one rank can see by itself: counts of wrong length or sign, null
/// pointers, dtypes that do not go together, a root outside the group, overlapping buffers, pointers off
/// their type's alignment.
void validate(const Collective& collective, int rank, int size, std::string_view where);

}  // namespace zeroth
