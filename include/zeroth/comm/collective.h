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

/// Between two ranks: the others of the group take no part.
[[nodiscard]] constexpr bool is_point_to_point(CollectiveKind kind) noexcept {
  return kind == CollectiveKind::kSend || kind == CollectiveKind::kRecv;
}

/// Whether `root` says something about such a call.
[[nodiscard]] constexpr bool has_root(CollectiveKind kind) noexcept {
  return kind == CollectiveKind::kBroadcast || kind == CollectiveKind::kGather || kind == CollectiveKind::kScatter ||
         is_point_to_point(kind);
}

/// "all_gather", "reduce_scatter", "all_reduce", "broadcast", "gather", "scatter", "all_to_all", "send", "recv",
/// "barrier".
[[nodiscard]] std::string_view name_of(CollectiveKind kind) noexcept;

/// How a reduction joins what the ranks give.
enum class ReduceOp : std::uint8_t { kSum, kMin, kMax };

/// "sum", "min", "max".
[[nodiscard]] std::string_view name_of(ReduceOp op) noexcept;

/// What a message is about. Ranks compare it, so that two calls of equal shape that changed places are an
/// error, not wrong data.
struct MessageTag {
  std::int32_t unit = -1;   ///< index of the unit, -1: none
  std::uint32_t label = 0;  ///< meaning is the caller's: a phase, a step
  bool operator==(const MessageTag&) const = default;
};

/// The call of a larger group that a call is a step of, as ranks compare it and errors name it.
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

/// One matched call. Every rank of the group makes the same calls in the same order with the same kind,
/// dtypes, counts, op, root, tag; in an all_to_all what a rank gives another one (its counts) is what that one takes
/// from it (its recv_counts). A send and a recv are matched by their two ranks alone: those from one rank to another in
/// order, and with the same dtype, count and tag. Sends and receives of one submit() run side by side: ranks that send
/// to each other submit both together. Alone, a send is done when the receiver has taken it; on inproc and shm also
/// before, as long as all that is on its way between the two fits 64 KiB. Over messages the transport decides.
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
/// Reductions sum, if `op` says nothing else, strictly in rank order ((s0 + s1) + s2) ..., inside each node first if
/// there are several (CommBackend::node_sizes()), in fp64 for fp64, fp32 for fp32, bf16 and fp16
/// (one rounding at the end), wrapping for integers; all_reduce gives the bits of reduce_scatter followed by
/// all_gather. Sums take every dtype but uint8, with out_dtype == in_dtype or fp32 on one side and bf16 or fp16 on
/// the other; the other calls take every dtype, out_dtype == in_dtype. In a reduce_scatter to fp32 each rank gives
/// fp32 or bf16 (not fp16), whatever the others give, with the bits of fp32 from all. A minimum or maximum takes every
/// dtype, out_dtype == in_dtype; of equal values (0 and -0) it is the lowest rank's, and one NaN makes it NaN. In
/// place: all_gather and gather with send at its place inside recv, reduce_scatter and scatter with recv at its place
/// inside send, all_reduce and broadcast with send == recv. Any other overlap is an error.
struct Collective {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType in_dtype = DType::kUInt8;
  DType out_dtype = DType::kUInt8;
  const std::byte* send = nullptr;
  std::byte* recv = nullptr;
  std::vector<std::int64_t> counts{};       ///< elements
  std::vector<std::int64_t> recv_counts{};  ///< elements; all_to_all only
  /// all_to_all only: the parts of all ranks have one size, by the program's word on all of them; ranks compare it. So
  /// a transport and a CallTable may choose by the size.
  bool equal_parts = false;
  /// Elements; reduce_scatter only: where each rank's part begins in `send`, one after the other in any order. Empty:
  /// in rank order.
  std::vector<std::int64_t> offsets{};
  ReduceOp op = ReduceOp::kSum;  ///< all_reduce, reduce_scatter
  int root = 0;                  ///< broadcast, gather, scatter; of a send and a recv the other rank
  bool accumulate = false;  ///< sum of a reduce_scatter only, not in place: recv = recv + sum; this rank's own matter
  MessageTag tag{};
  WholeCall step_of{};
  /// Of a barrier: ranks compare it, errors and the flight recorder say it (both at least its first 45 bytes). Empty:
  /// it has none.
  std::string name{};
};

/// " to rank 3" of a send, " from rank 3" of a recv.
[[nodiscard]] std::string other_rank(CollectiveKind kind, int rank);

/// "all_gather float32 [8, 8, 7] unit=3 label=0".
[[nodiscard]] std::string describe(const Collective& collective);

/// Elements of a rank's buffers; 0 where it does not use one.
struct CallExtent {
  std::int64_t send = 0;
  std::int64_t recv = 0;
};

/// Of a call whose counts are as many as its kind wants.
[[nodiscard]] CallExtent extent_of(const Collective& collective, int rank);

/// Throws kUsage with `where` for what one rank can see by itself: counts of wrong length or sign, null
/// pointers, dtypes that do not go together, a root outside the group, overlapping buffers, pointers off
/// their type's alignment.
void validate(const Collective& collective, int rank, int size, std::string_view where);

}  // namespace zeroth
