// Collective: one call of a group, as a value. A decorator can count it, compare it between ranks, delay it or fail it.
#pragma once

#include <zeroth/base/dtype.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

enum class CollectiveKind : std::uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kGather,
  kScatter,
  kAllToAll,
  kSend,
  kRecv,
  kBarrier
};
inline constexpr std::size_t kNumCollectiveKinds = 10;

/// True for a call between two ranks; the other ranks of the group take no part.
[[nodiscard]] constexpr bool is_point_to_point(CollectiveKind kind) noexcept {
  return kind == CollectiveKind::kSend || kind == CollectiveKind::kRecv;
}

/// True if calls of this kind use `root`.
[[nodiscard]] constexpr bool has_root(CollectiveKind kind) noexcept {
  return kind == CollectiveKind::kBroadcast || kind == CollectiveKind::kGather || kind == CollectiveKind::kScatter ||
         is_point_to_point(kind);
}

/// "all_gather", "reduce_scatter", "all_reduce", "broadcast", "gather", "scatter", "all_to_all", "send", "recv",
/// "barrier".
[[nodiscard]] std::string_view name_of(CollectiveKind kind) noexcept;

/// The operation of a reduction.
enum class ReduceOp : std::uint8_t { kSum, kMin, kMax };

/// "sum", "min", "max".
[[nodiscard]] std::string_view name_of(ReduceOp op) noexcept;

/// The subject of a call. Ranks compare it, so two swapped calls of equal shape are an error instead of wrong data.
struct MessageTag {
  std::int32_t unit = -1;   ///< index of the unit, -1: none
  std::uint32_t label = 0;  ///< meaning is the caller's: a phase, a step
  bool operator==(const MessageTag&) const = default;
};

/// If a call is a step of a call in a larger group: that call, for comparison between ranks and for errors.
struct WholeCall {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType in_dtype = DType::kUInt8;
  DType out_dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  bool equal_parts = false;
  int root = 0;
  std::int64_t elements = 0;
  std::uint64_t digest = 0;  ///< 0: the call is no step
  bool operator==(const WholeCall&) const = default;
};

/// One matched call. Every rank of the group makes the same calls in the same order, with the same kind, dtypes,
/// counts, op, root and tag. In an all_to_all, the count of rank a for rank b equals the recv_count of rank b from rank
/// a.
///
/// A send and a recv are matched between their two ranks only: in order, with the same dtype, count and tag. Sends and
/// receives of one submit() run side by side, so two ranks that send to each other submit both calls together. A single
/// send is done when the receiver has taken it; on inproc and shm it may be done earlier, while the data in flight
/// between the two ranks fits 64 KiB. Over messages the transport decides. CommBackend::start() makes sends and
/// receives that nobody waits for yet.
///
///   kind            counts                  send                        recv
///   all_gather      elements of each rank   own part, counts[rank]      all parts in rank order, sum(counts)
///   reduce_scatter  elements of each rank   all parts, sum(counts); see offsets   own part of the sum, counts[rank]
///   all_reduce      {n}                     n                           n
///   broadcast       {n}                     n at the root, else unused  n, at the root too
///   gather          elements of each rank   own part, counts[rank]      all parts at the root, else unused
///   scatter         elements of each rank   all parts at the root, else unused   own part, counts[rank]
///   all_to_all      elements for each rank  a part for each rank, sum(counts)    a part from each, sum(recv_counts)
///   send            {n}                     n                           -
///   recv            {n}                     -                           n
///   barrier         {}                      -                           -
///
/// Sums are formed strictly in rank order ((s0 + s1) + s2) ..., and with several nodes first inside each node
/// (CommBackend::node_sizes()). They are computed in fp64 for fp64, in fp32 for fp32, bf16 and fp16 (one rounding at
/// the end), and wrap for integers. all_reduce has the bits of reduce_scatter followed by all_gather.
///
///   call             dtypes
///   sum              every dtype but uint8; out_dtype == in_dtype, or fp32 on one side and bf16 or fp16 on the other
///   sum of a reduce_scatter to fp32   each rank gives fp32 or bf16 (not fp16), also mixed; the bits are those of fp32
///   minimum, maximum every dtype, out_dtype == in_dtype; among equal values (0 and -0) the lowest rank's; any NaN: NaN
///   other calls      every dtype, out_dtype == in_dtype
///
/// Allowed in place: all_gather and gather with send at its place inside recv, reduce_scatter and scatter with recv at
/// its place inside send, all_reduce and broadcast with send == recv. Any other overlap is an error.
struct Collective {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType in_dtype = DType::kUInt8;
  DType out_dtype = DType::kUInt8;
  const std::byte* send = nullptr;
  std::byte* recv = nullptr;
  std::vector<std::int64_t> counts{};       ///< elements
  std::vector<std::int64_t> recv_counts{};  ///< elements; all_to_all only
  /// all_to_all only: true if the parts of all ranks have one size. The program promises this on all ranks, and ranks
  /// compare it. A transport and a CallTable may then choose by the size.
  bool equal_parts = false;
  /// reduce_scatter only: offset of each rank's part in `send`, in elements. The parts are adjacent, in any order.
  /// Empty: in rank order.
  std::vector<std::int64_t> offsets{};
  ReduceOp op = ReduceOp::kSum;  ///< all_reduce, reduce_scatter
  int root = 0;                  ///< broadcast, gather, scatter: the root; send, recv: the other rank
  bool accumulate = false;       ///< sum of a reduce_scatter only, not in place: recv = recv + sum; may differ by rank
  MessageTag tag{};
  WholeCall step_of{};
  /// Name of a barrier, for comparison between ranks, errors and the flight recorder (at least its first 45 bytes).
  /// Empty: no name.
  std::string name{};
};

/// " to rank 3" of a send, " from rank 3" of a recv.
[[nodiscard]] std::string other_rank(CollectiveKind kind, int rank);

/// "all_gather float32 [8, 8, 7] unit=3 label=0".
[[nodiscard]] std::string describe(const Collective& collective);

/// Number of elements in a rank's buffers; 0 if it does not use the buffer.
struct CallExtent {
  std::int64_t send = 0;
  std::int64_t recv = 0;
};

/// The extent of a call. Its counts must have the length that its kind needs.
[[nodiscard]] CallExtent extent_of(const Collective& collective, int rank);

/// Checks everything that one rank can check alone. Throws kUsage with `where` for counts of wrong length or sign, null
/// pointers, a wrong combination of dtypes, a root outside the group, overlapping buffers, and unaligned pointers.
void validate(const Collective& collective, int rank, int size, std::string_view where);

}  // namespace zeroth
